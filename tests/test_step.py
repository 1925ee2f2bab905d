"""A step as the caller sees it: arguments, metrics, keys, randomness, lowering, explanations."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc
from tests.harness import assert_equal, gathered, integers, ranks
from tests.oracle import Oracle, Sgd
from zfunc import optim, random, tree

RATE = 2.0**-6


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"w": integers(generator, (3, 4)), "u": integers(generator, (4,))}


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return (torch.relu(batch @ params["w"]) @ params["u"]).square().mean()


def rows(rank: int, count: int = 2) -> Tensor:
    return integers(torch.Generator().manual_seed(10 + rank), (count, 3))


def test_metrics_are_tensors_without_dims() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss_fn, mesh)
        state, metrics = step(step.init(params(), optim.sgd(RATE)), rows(mesh.rank))
        names = ["loss", "grad_norm", "grad_norm_clipped", "lr", "skipped", "loss_scale"]
        assert [*sorted(metrics)] == sorted([*names, "exposed_communication_s"])
        for name, value in metrics.items():
            assert isinstance(value, Tensor) and value.shape == (), name
        assert float(metrics["lr"]) == RATE
        assert float(metrics["loss_scale"]) == 1.0
        assert metrics["loss"].dtype == torch.float64
        assert isinstance(state, zfunc.State) and int(state.step) == 1

    ranks(2, run)


def test_metrics_agree_on_all_ranks() -> None:
    def run(mesh: zfunc.Mesh) -> list[float]:
        step = zfunc.shard(loss_fn, mesh)
        _, metrics = step(step.init(params(), optim.adamw(RATE)), rows(mesh.rank))
        return [float(metrics[name]) for name in ("loss", "grad_norm", "lr", "skipped")]

    one, *others = ranks({"replica": 2, "shard": 2}, run)
    assert all(other == one for other in others)


def test_a_loss_keeps_its_dtype_and_is_the_mean_of_all_ranks() -> None:
    def run(mesh: zfunc.Mesh) -> Tensor:
        step = zfunc.shard(lambda p, b: (p * b).sum().to(torch.bfloat16), mesh)
        state = step.init(torch.ones(2), optim.sgd(RATE))
        return step.value_and_grad(state.params, torch.full((2,), 1.0 + mesh.rank))[0]

    for value in ranks(2, run):
        assert value.dtype == torch.bfloat16 and float(value) == 3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite": "never"}, r"'skip', 'raise' or 'ignore'"),
        ({"accum": 0}, r"(?s)accum=. is 0.*micro-batches, 1 or more"),
        ({"accum": 1.5}, r"(?s)accum=. is 1.5.*micro-batches, 1 or more"),
        ({"accum": True}, r"(?s)accum=. is True.*micro-batches, 1 or more"),
        ({"remat": "all"}, r"policies.nothing"),
    ],
    ids=str,
)
def test_options_are_checked_at_once(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zfunc.shard(loss_fn, zfunc.mesh(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zfunc.Prefetch(live_bytes=1e9), r"(?s)live_bytes=. is 1000000000.0.*bytes, 0 or"),
        (lambda: zfunc.Prefetch(ahead_bytes=-1), r"ahead_bytes=. is -1"),
        (lambda: zfunc.Capture(check_every=-1), r"check_every=. is -1"),
        (lambda: zfunc.Capture(max_signatures=0), r"(?s)max_signatures=. is 0.*1 or more"),
    ],
)
def test_settings_are_whole_numbers(make: Any, message: str) -> None:
    with pytest.raises(zfunc.LayoutError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"specs": zfunc.Flat("shrad")}, r"(?s)params\['u'\].*did you mean 'shard'"),
        ({"specs": {"w": zfunc.Flat()}}, r"(?s)specs\['params'\].*not a prefix"),
        ({"specs": {"opt": zfunc.Flat()}}, r"(?s)lack 'params'"),
        ({"specs": {"params": zfunc.Flat(), "opt": zfunc.P()}}, r"(?s)params\['u'\] do not nest"),
        ({"specs": "flat"}, r"(?s)params\['u'\].*Flat\(axis\) or P\(\)"),
        ({"trainable": {"x": True}}, r"(?s)trainable is not a prefix"),
    ],
    ids=str,
)
def test_options_per_leaf_are_checked_against_the_tree(options: Any, message: str) -> None:
    step = zfunc.shard(loss_fn, zfunc.mesh(), **options)
    with pytest.raises(ValueError, match=message):
        step.init(params(), optim.sgd(RATE))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda p, b: p["w"], "a 0-d floating tensor"),
        (lambda p, b: p["u"].sum().long(), "a 0-d floating tensor"),
        (lambda p, b: 1.0, "a 0-d floating tensor"),
        (lambda p, b: None, "a 0-d floating tensor"),
        (lambda p, b: (p["u"].sum(), 1, 2), r"a loss, or \(sum, weight\)"),
        (lambda p, b: (p["u"].sum(), p["u"]), "a weight of one element"),
    ],
    ids=["vector", "integer", "number", "nothing", "three", "weights"],
)
def test_what_is_not_a_loss(loss: Any, expected: str) -> None:
    step = zfunc.shard(loss, zfunc.mesh())
    state = step.init(params(), optim.sgd(RATE))
    with pytest.raises(zfunc.CaptureError, match=rf"(?s)something else than a loss.*{expected}"):
        step(state, rows(0))


def test_has_aux_wants_a_pair() -> None:
    step = zfunc.shard(loss_fn, zfunc.mesh(), has_aux=True)
    with pytest.raises(zfunc.CaptureError, match=r"(?s)expected  \(loss, aux\)"):
        step(step.init(params(), optim.sgd(RATE)), rows(0))


def test_rich_aux_is_that_of_the_rank() -> None:
    def loss(params: Any, batch: Tensor) -> Any:
        h = batch @ params["w"]
        aux = {"h": h, "pair": (h.sum(), "text"), "none": None, "n": len(batch), "w": params["w"]}
        return h.sum(), aux

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh, has_aux=True)
        state = step.init(params(), optim.sgd(RATE))
        batch = rows(mesh.rank, 1 + mesh.rank)
        (_, aux), _ = step.value_and_grad(state.params, batch)
        state, metrics = step(state, batch)
        return aux, metrics["aux"]

    for rank, seen in enumerate(ranks(2, run)):
        expected = loss(params(), rows(rank, 1 + rank))[1]
        for aux in seen:
            assert tree.structure(aux) == tree.structure(expected)
            assert (aux["n"], aux["pair"][1]) == (1 + rank, "text")
            assert torch.equal(aux["h"], expected["h"])
            assert torch.equal(aux["w"], params()["w"]), "of before the update"


def test_value_and_grad_gives_jax_order_and_laid_out_gradients() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        for stage in (1, 2, 3):
            step = zfunc.shard(loss_fn, mesh, specs=zfunc.zero(stage))
            state = step.init(params(), optim.sgd(RATE))
            value, grads = step.value_and_grad(state.params, rows(mesh.rank))
            assert value.shape == ()
            spec = zfunc.Flat() if stage > 1 else zfunc.P()
            assert all(grads[name].layout.spec == spec for name in ("w", "u"))
            assert {name: leaf.shape for name, leaf in grads.items()} == {"w": (3, 4), "u": (4,)}

    ranks(2, run)


def test_gradients_of_a_hand_written_loop() -> None:
    """value_and_grad and optim.apply_updates on pieces are the step."""

    def run(mesh: zfunc.Mesh) -> tuple[list[Tensor], list[Tensor]]:
        step = zfunc.shard(loss_fn, mesh)
        state = step.init(params(), optim.sgd(RATE))
        mine = tree.map(torch.clone, state.params)
        for number in range(2):
            _, grads = step.value_and_grad(mine, rows(mesh.rank + 2 * number))
            mine = optim.apply_updates(mine, tree.map(lambda g: -RATE * g, grads))
            state, _ = step(state, rows(mesh.rank + 2 * number))
        return gathered(mine), gathered(state.params)

    for mine, theirs in ranks(2, run):
        assert_equal(mine, theirs)


# Keys and global generators.


def keyed_loss(params: Any, batch: Tensor, *, key: Tensor) -> Tensor:
    mask = random.bernoulli(key, 0.5, (4,))
    return ((batch @ params["w"]) * mask * params["u"]).sum()


@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 2}, {"replica": 2, "shard": 2}], ids=str)
def test_a_key_is_folded_with_step_rank_and_micro_batch(axes: Any) -> None:
    world = math.prod(axes.values())
    _, state_key = random.split(random.key(5))
    data = [[rows(rank), rows(rank + 7)] for rank in range(world)]
    oracle = Oracle(keyed_loss, params(), Sgd(RATE), axes=axes)
    fold, expected = random.fold_in, []
    for number in range(3):
        own = [fold(fold(state_key, number), rank) for rank in range(world)]
        keys = [[fold(one, micro) for micro in range(2)] for one in own]
        assert len({str(key) for row in keys for key in row}) == 2 * world
        expected.append(oracle.step(data, keys).loss)

    def run(mesh: zfunc.Mesh) -> tuple[list[float], list[Tensor]]:
        step = zfunc.shard(keyed_loss, mesh, accum=2)
        state = step.init(params(), optim.sgd(RATE), key=random.key(5))
        losses = []
        for _ in range(3):
            state, metrics = step(state, data[mesh.rank])
            losses.append(float(metrics["loss"]))
        assert torch.equal(state.key, state_key)
        return losses, gathered(state.params)

    for losses, after in ranks(axes, run):
        assert losses == expected
        assert_equal(after, oracle.tensors)


def test_a_loss_that_wants_a_key_says_so() -> None:
    step = zfunc.shard(keyed_loss, zfunc.mesh())
    state = step.init(params(), optim.sgd(RATE))
    with pytest.raises(zfunc.LayoutError, match=r"(?s)takes a key.*random\.key\(seed\)"):
        step(state, rows(0))
    with pytest.raises(zfunc.LayoutError, match=r"(?s)takes a key.*value_and_grad\(..., key=\)"):
        step.value_and_grad(state.params, rows(0))
    step.value_and_grad(state.params, rows(0), key=random.key(0))


def dropout_loss(params: Any, batch: Tensor) -> Tensor:
    h = F.dropout(batch @ params["w"], 0.5)
    return (F.dropout(h, 0.25) * params["u"]).sum()


@pytest.mark.parametrize("remat", [None, zfunc.policies.nothing], ids=["kept", "remat"])
def test_dropout_without_a_key_follows_torchs_generator(remat: Any) -> None:
    def dense(mesh: zfunc.Mesh) -> Tensor:
        torch.manual_seed(mesh.rank)
        leaves = tree.map(lambda x: x.clone().requires_grad_(), params())
        for batch in (rows(mesh.rank), rows(mesh.rank + 5)):
            dropout_loss(leaves, batch).backward()
        return leaves["w"].grad, torch.rand(2)

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(dropout_loss, mesh, accum=2, remat=remat, specs=zfunc.zero(1))
        state = step.init(params(), optim.sgd(RATE))
        torch.manual_seed(mesh.rank)
        batches = [rows(mesh.rank), rows(mesh.rank + 5)]
        grads = step.value_and_grad(state.params, batches)[1]
        return zfunc.gather(grads)["w"], torch.rand(2)

    grads, draws = zip(*ranks(2, dense), strict=True)
    for rank, (got, after) in enumerate(ranks(2, run)):
        assert torch.equal(got, (grads[0] + grads[1]) / 4)
        assert torch.equal(after, draws[rank]), "the generator stands where torch would leave it"


def test_dropout_with_a_key_repeats_and_changes_with_every_step_and_rank() -> None:
    def loss(params: Any, batch: Tensor) -> Any:
        kept = F.dropout(torch.ones(64, dtype=torch.float64), 0.5)
        return (kept * params["w"].sum()).sum() * 0, kept

    def run(mesh: zfunc.Mesh) -> list[Tensor]:
        torch.manual_seed(mesh.rank)
        before = torch.get_rng_state()
        seen = []
        for _ in range(2):
            step = zfunc.shard(loss, mesh, has_aux=True)
            state = step.init(params(), optim.sgd(RATE), key=random.key(1))
            for _ in range(3):
                state, metrics = step(state, rows(mesh.rank))
                seen.append(metrics["aux"])
        assert torch.equal(torch.get_rng_state(), before), "the caller's generator is not moved"
        return seen

    one, other = ranks(2, run)
    for seen in (one, other):
        assert_equal(seen[:3], seen[3:])
    draws = {str(x.tolist()) for x in [*one[:3], *other[:3]]}
    assert len(draws) == 6


# Lowering, explaining, caching.


def test_lower_needs_neither_process_group_nor_tensors() -> None:
    step = zfunc.shard(loss_fn, zfunc.abstract_mesh({"replica": 8, "shard": 64}))
    like = zfunc.ShapeDtype((2, 3), torch.float64)
    state = step.abstract(params(), optim.adamw(RATE))
    lowered = step.lower(state, like)
    memory, cost = lowered.memory_analysis(), lowered.cost_analysis()
    assert memory.unsharded_params_bytes == (12 + 4) * 8
    assert memory.unsharded_opt_bytes == 2 * (12 + 4) * 8 + 2 * 8
    assert memory.params_bytes == 2 * 8, "one element of each leaf on rank 0"
    assert cost is not None
    assert lowered.as_text().startswith("program loss_fn step  mesh[replica:8 shard:64]")
    with pytest.raises(zfunc.LayoutError, match="abstract"):
        step(state, rows(0))


def test_lower_of_a_real_state_is_the_program_that_runs() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss_fn, mesh)
        state = step.init(params(), optim.sgd(RATE))
        program = step.lower(state, rows(0)).program
        step(state, rows(mesh.rank))
        assert step.explain().misses == 1
        assert step._training.programs.compiled[0].program is program

    ranks(2, run)


def test_explain_tells_what_is_kept_and_gathered_again() -> None:
    def deep(params: Any, batch: Tensor) -> Tensor:
        for w in params:
            batch = torch.tanh(batch @ w)
        return batch.sum()

    mesh = zfunc.abstract_mesh({"shard": 2})
    layers = [torch.ones(300, 300).double() for _ in range(4)]
    like = zfunc.ShapeDtype((2, 300), torch.float64)

    def report(live_bytes: int | None) -> Any:
        step = zfunc.shard(deep, mesh, prefetch=zfunc.Prefetch(live_bytes=live_bytes))
        step.lower(step.abstract(layers, optim.sgd(RATE)), like)
        text = str(step.explain())
        (found,) = step.explain().signatures
        assert f"{len(found.kept)} leaves gathered once" in text
        return found

    with pytest.raises(zfunc.BudgetError) as refused:
        report(0)
    names = {f"params[{i}]" for i in range(4)}
    ample, tight = report(None), report(refused.value.needed_bytes)
    assert (ample.rung, ample.derivation) == ("traced", "vjp")
    assert set(ample.kept) == names and ample.gathered_again == {}
    assert tight.gathered_again and set(tight.gathered_again.values()) == {2}
    assert set(tight.kept) == names - set(tight.gathered_again)
    assert tight.limit_bytes == refused.value.needed_bytes


def test_a_signature_is_captured_once() -> None:
    calls = []

    def counting(params: Any, batch: Any) -> Tensor:
        calls.append(1)
        return loss_fn(params, batch["x"]) * batch["factor"]

    step = zfunc.shard(counting, zfunc.mesh())
    state = step.init(params(), optim.sgd(RATE))
    signatures = [(2, 1), (2, 1), (3, 1), (2, 2), (2, 1.0), (3, 1), (2, True), (2, 1)]
    for expected, (count, factor) in zip([1, 1, 2, 3, 4, 4, 5, 5], signatures, strict=True):
        state, _ = step(state, {"x": rows(0, count), "factor": factor})
        assert len(calls) == expected == step.explain().misses
    step.value_and_grad(state.params, {"x": rows(0), "factor": 1})
    assert len(calls) == 5, "the gradient alone is planned from the same trace"


def test_other_strides_are_another_signature_with_the_same_result() -> None:
    step = zfunc.shard(loss_fn, zfunc.mesh())
    state = step.init(params(), optim.sgd(RATE))
    batch = rows(0, 4)
    expected = float(loss_fn(params(), batch))
    doubled = torch.stack([batch, batch], dim=-1)[..., 0]
    for one in (batch, batch.t().contiguous().t(), doubled):
        assert float(step.value_and_grad(state.params, one)[0]) == expected
    assert step.explain().misses == 3


def test_callables_of_any_kind_are_losses() -> None:
    class Loss:
        def __call__(self, params: Any, batch: Tensor) -> Tensor:
            return loss_fn(params, batch)

        def method(self, params: Any, batch: Tensor) -> Tensor:
            return loss_fn(params, batch)

    def scaled(factor: float, params: Any, batch: Tensor) -> Tensor:
        return loss_fn(params, batch) * factor

    expected = float(loss_fn(params(), rows(0)))
    for loss in (Loss(), Loss().method, functools.partial(scaled, 1.0), zfunc.remat(loss_fn)):
        step = zfunc.shard(loss, zfunc.mesh())
        state = step.init(params(), optim.sgd(RATE))
        assert float(step(state, rows(0))[1]["loss"]) == expected


def test_a_batch_on_another_device_is_named() -> None:
    step = zfunc.shard(lambda p, b: (p["w"].sum() * b["x"][0]).sum(), zfunc.mesh())
    state = step.init(params(), optim.sgd(RATE))
    with pytest.raises(zfunc.LayoutError, match=r"(?s)batch\['x'\]\[0\] is on the wrong device"):
        step(state, {"x": [torch.ones(2, device="meta")]})


def test_plain_tensors_in_place_of_pieces_are_named() -> None:
    step = zfunc.shard(loss_fn, zfunc.mesh())
    with pytest.raises(zfunc.LayoutError, match=r"(?s)params\['u'\] is not laid out.*Step.init"):
        step.value_and_grad(params(), rows(0))


def test_a_budget_that_is_too_small_names_the_smallest() -> None:
    mesh = zfunc.abstract_mesh({"shard": 2})
    step = zfunc.shard(loss_fn, mesh, prefetch=zfunc.Prefetch(live_bytes=50))
    state = step.abstract(params(), optim.sgd(RATE))
    with pytest.raises(zfunc.BudgetError, match=r"live_bytes is too small for") as caught:
        step.lower(state, rows(0))
    error = caught.value
    assert error.limit_bytes == 50 < error.needed_bytes
    for limit, fits in ((error.needed_bytes, True), (error.needed_bytes - 1, False)):
        step = zfunc.shard(loss_fn, mesh, prefetch=zfunc.Prefetch(live_bytes=limit))
        if fits:
            assert step.lower(state, rows(0)).memory_analysis().peak_live_bytes <= limit
        else:
            with pytest.raises(zfunc.BudgetError):
                step.lower(state, rows(0))
