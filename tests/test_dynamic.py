"""The dynamic rung: Python runs the loss as it is; everything around it is as on the traced one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.checker import check, live_bytes
from tests.harness import assert_equal, bits, gathered, ranks
from tests.oracle import Oracle, Sgd
from tests.ranks import run_ranks
from zfunc import optim
from zfunc.program.ir import Accumulate, Call, Free, Gather, Reduce, Status, Update, Wait

RATE = 2.0**-8
HSDP = {"replica": 2, "shard": 2}


def params() -> dict[str, Tensor]:
    tree = {"w": torch.arange(9.0).view(3, 3) - 4, "v": torch.ones(3), "unused": torch.ones(5)}
    return {name: leaf.double() for name, leaf in tree.items()}


def loss_fn(p: Any, x: Tensor) -> Tensor:
    """Takes another branch by a value."""
    h = x @ p["w"]
    if float(h.detach().sum()) > 0:
        return (h * p["v"]).square().sum()
    return -h.sum()


def rows(rank: int, micro: int = 0, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(-2, 3, (2 + (rank + micro) % 2, 3), generator=generator).double()


def dense(loss: Any, axes: Any, batches: list[Any], **options: Any) -> Oracle:
    """A run of steps on `batches[step][rank][micro]`; a gradient is summed before it is reduced."""
    oracle = Oracle(loss, params(), Sgd(RATE), axes=axes, whole_grads=True, **options)
    for batch in batches:
        oracle.step(batch)
    return oracle


def program_of(loss: Any, axes: Any, accum: int = 1, **options: Any) -> Any:
    step = zfunc.shard(loss, zfunc.abstract_mesh(axes), accum=accum, **options)
    state = step.abstract(params(), optim.sgd(RATE))
    return step.lower(state, [rows(0)] * accum if accum > 1 else rows(0)).program


@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 3}, HSDP], ids=str)
@pytest.mark.parametrize("accum", [1, 3])
def test_the_program_gathers_once_calls_and_reduces_once(axes: Any, accum: int) -> None:
    program = program_of(loss_fn, axes, accum)
    check(program)
    calls: list[list[type]] = [[Call], *([Call, Accumulate, Free] for _ in range(accum - 1))]
    calls[-1].insert(1, Free)  # the copies live until the last call
    reduces = [Reduce, Wait, Free] * len(axes)
    kinds = [Gather, Wait, *(kind for part in calls for kind in part), *reduces, Status, Update]
    assert [type(op) for op in program.ops] == kinds
    (first,) = [op for op in program.ops if isinstance(op, Gather)]
    made = [op for op in program.ops if isinstance(op, Call)]
    assert [op.micro for op in made] == list(range(accum))
    assert all(op.leaves == first.outs for op in made), "gathers are kept across micro-batches"
    assert first.leaves == (0, 1, 2)


def train(mesh: zfunc.Mesh, accum: int, steps: int, options: Any) -> Any:
    step = zfunc.shard(loss_fn, mesh, accum=accum, **options)
    state = step.init(params(), optim.sgd(RATE))
    losses = []
    for number in range(steps):
        micros = [rows(mesh.rank, micro, number) for micro in range(accum)]
        state, metrics = step(state, micros if accum > 1 else micros[0])
        losses.append(float(metrics["loss"]))
    (report,) = step.explain().signatures
    return losses, gathered(state.params), report.rung, step.explain().misses


OPTIONS: dict[str, dict[str, Any]] = {
    "zero 3": {},
    "zero 2": {"specs": zfunc.zero(2)},
    "zero 1": {"specs": zfunc.zero(1)},
    "chosen": {"capture": "dynamic"},
}


@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 2}, {"shard": 3}, HSDP], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("accum", [1, 2])
def test_values_are_those_of_a_dense_run(axes: Any, options: Any, accum: int) -> None:
    world = zfunc.abstract_mesh(axes).size
    batches = [[[rows(r, m, s) for m in range(accum)] for r in range(world)] for s in range(3)]
    oracle = Oracle(loss_fn, params(), Sgd(RATE), axes=axes, whole_grads=True)
    expected = [oracle.step(batch).loss for batch in batches]
    for losses, after, rung, misses in ranks(axes, train, accum, 3, options):
        assert losses == expected
        assert_equal(after, oracle.tensors)
        assert (rung, misses) == ("dynamic", 2 if "capture" not in options else 1)


def test_values_on_processes() -> None:
    oracle = dense(loss_fn, {"shard": 2}, [[[rows(r, m) for m in (0, 1)] for r in (0, 1)]])
    for _, after, _, _ in run_ranks(2, train, 2, 1, {}):
        assert_equal(after, oracle.tensors)


def test_a_budget_below_all_parameters_and_gradients_is_refused_with_the_reason() -> None:
    """The error names the budget, and why the loss could not be traced."""
    needed = max(live_bytes(program_of(loss_fn, {"shard": 2})))
    whole = sum(leaf.nbytes for leaf in params().values())
    assert needed >= 2 * whole
    enough = zfunc.Prefetch(live_bytes=needed)
    assert program_of(loss_fn, {"shard": 2}, prefetch=enough).limit_bytes == needed
    for capture in ("auto", "dynamic"):
        with pytest.raises(zfunc.BudgetError, match=f"at least {needed}") as caught:
            short = zfunc.Prefetch(live_bytes=needed - 1)
            program_of(loss_fn, {"shard": 2}, prefetch=short, capture=capture)
        cause = caught.value.__cause__
        if capture == "auto":
            assert isinstance(cause, zfunc.CaptureError)
            assert f"{__file__}:" in str(cause), "the line that looks at a value"


def test_the_log_says_once_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zfunc"):
        ranks(1, train, 1, 3, {})
    (record,) = caplog.records
    assert "loss_fn runs on the dynamic rung" in record.getMessage()


def attempt(mesh: zfunc.Mesh, loss: Any, batch: Any, good: Any, options: Any) -> Any:
    """What a step raises; that the state is as it was; leaves after a good step from it."""
    step = zfunc.shard(loss, mesh, **({"capture": "dynamic"} | options))
    state = step.init(params(), optim.sgd(RATE))
    before = bits(state.params)
    said = ("", "")
    try:
        step(state, batch(mesh))
    except Exception as error:
        said = type(error).__name__, str(error)
    assert_equal(bits(state.params), before)
    state, _ = step(state, good(mesh))
    return said, gathered(state.params)


class Fails:
    """Raises where the batch says so: in the loss or in its backward pass."""

    def __call__(self, p: Any, b: Any) -> Tensor:
        x, how = b
        loss = loss_fn(p, x)
        if how == "forward":
            raise ArithmeticError("told to fail")
        return _Backward.apply(loss) if how == "backward" else loss  # pyright: ignore


class _Backward(torch.autograd.Function):
    """The identity, whose derivative fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        raise ArithmeticError("told to fail")


@pytest.mark.parametrize("specs", [zfunc.zero(3), zfunc.zero(1)], ids=["3", "1"])
@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize("accum", [1, 2])
def test_a_call_that_fails_is_an_error_everywhere_and_changes_nothing(
    specs: Any, how: str, accum: int
) -> None:
    def batch(mesh: zfunc.Mesh) -> Any:
        bad = how if mesh.rank == 1 else ""
        return [(rows(mesh.rank), ""), (rows(mesh.rank), bad)][-accum:]

    def picked(make: Any) -> Any:
        return lambda mesh: make(mesh) if accum > 1 else make(mesh)[0]

    def good(mesh: zfunc.Mesh) -> Any:
        return [(rows(mesh.rank), "")] * accum

    oracle = dense(Fails(), {"shard": 3}, [[[(rows(rank), "")] * accum for rank in range(3)]])
    options = {"specs": specs, "accum": accum}
    results = ranks(3, attempt, Fails(), picked(batch), picked(good), options)
    for rank, ((name, text), after) in enumerate(results):
        assert "told to fail" in text
        assert name == ("ArithmeticError" if rank == 1 else "RemoteRankError")
        assert_equal(after, oracle.tensors)


def gathers(p: Any, x: Any) -> Tensor:
    return loss_fn(p, x[0]) + zfunc.gather(x[1]).sum()


def scatters(p: Any, x: Any) -> Tensor:
    sums = zfunc.scatter(p["v"], x[1].layout.mesh, zfunc.Flat(), reduce="sum")
    return loss_fn(p, x[0]) + sums.local.sum()


def slices(p: Any, x: Any) -> Tensor:
    """Takes a slice without communication: allowed."""
    return loss_fn(p, x[0]) + zfunc.scatter(p["v"], x[1].layout.mesh, zfunc.P()).local.sum()


@pytest.mark.parametrize("loss", [gathers, scatters, slices])
def test_collectives_inside_are_refused_on_every_rank(loss: Any) -> None:
    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh, capture="dynamic")
        state = step.init(params(), optim.sgd(RATE))
        piece = zfunc.scatter(torch.ones(4), mesh, zfunc.Flat())
        if loss is slices:
            state, _ = step(state, (rows(mesh.rank), piece))
            return gathered(state.params)
        with pytest.raises(zfunc.CaptureError, match="inside a loss on the dynamic rung"):
            step(state, (rows(mesh.rank), piece))
        return None

    results = ranks(2, run)
    if loss is slices:
        oracle = dense(
            lambda p, x: loss_fn(p, x) + p["v"].sum(), {"shard": 2}, [[[rows(0)], [rows(1)]]]
        )
        for after in results:
            assert_equal(after, oracle.tensors)


def writes_leaf(p: Any, x: Tensor) -> Tensor:
    p["w"].detach().mul_(2)
    return loss_fn(p, x)


def writes_leaf_itself(p: Any, x: Tensor) -> Tensor:
    p["w"].mul_(2)
    return loss_fn(p, x)


def writes_leaf_data(p: Any, x: Tensor) -> Tensor:
    p["w"].data.mul_(2)
    return loss_fn(p, x)


def writes_batch_data(p: Any, x: Tensor) -> Tensor:
    x[1:].data.mul_(2)
    return loss_fn(p, x)


def writes_unused(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        p["unused"].zero_()
    return loss_fn(p, x)


def writes_view_of_batch(p: Any, x: Tensor) -> Tensor:
    x[0].zero_()
    return loss_fn(p, x)


WRITES = {
    writes_leaf: "params['w']",
    writes_leaf_itself: "writes into a parameter in place at",
    writes_leaf_data: "params['w']",
    writes_unused: "params['unused']",
    writes_view_of_batch: "argument batch",
    writes_batch_data: "argument batch",
}


@pytest.mark.parametrize("specs", [zfunc.zero(3), zfunc.zero(1)], ids=["3", "1"])
@pytest.mark.parametrize("loss", WRITES, ids=lambda loss: loss.__name__)
def test_a_write_into_an_argument_is_refused_by_its_path(loss: Any, specs: Any) -> None:
    """The state is not touched, whether a leaf is gathered or whole on every rank."""

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh, capture="dynamic", specs=specs)
        state = step.init(params(), optim.sgd(RATE))
        before = bits(state.params)
        with pytest.raises(zfunc.CaptureError) as caught:
            step(state, rows(mesh.rank) + 1)
        assert_equal(bits(state.params), before)
        return str(caught.value)

    for text in ranks(2, run):
        assert WRITES[loss] in text


def test_reading_data_and_writing_into_that_of_others_is_allowed() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        h = x @ p["w"]
        h.data.clamp_(-2, 2)
        return h.sum() * p["v"].data.sum() if float(p["w"].data.abs().sum()) > 0 else h.sum()

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh, capture="dynamic")
        state, _ = step(step.init(params(), optim.sgd(RATE)), rows(mesh.rank))
        return gathered(state.params)

    oracle = dense(loss, {"shard": 2}, [[[rows(0)], [rows(1)]]])
    for after in ranks(2, run):
        assert_equal(after, oracle.tensors)


class Block:
    """Counts how often it runs; draws random numbers."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        self.runs += 1
        return torch.nn.functional.dropout(torch.sin(x @ w), 0.5)


def test_remat_is_a_checkpoint() -> None:
    """The inside runs again in the backward pass, with the same random numbers, and is not kept."""
    blocks = [Block(), Block()]
    inner = [blocks[0], zfunc.remat(blocks[1])]

    def run(mesh: zfunc.Mesh, which: int) -> Any:
        def loss(p: Any, x: Tensor) -> Tensor:
            h = inner[which](x, p["w"])
            assert float(h.detach().sum()) < 1e9
            return (h * p["v"]).sum()

        saved: list[int] = []

        def watched(p: Any, x: Tensor) -> Tensor:
            def pack(tensor: Tensor) -> Tensor:
                saved.append(tensor.untyped_storage().data_ptr())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return loss(p, x)

        torch.manual_seed(3)
        step = zfunc.shard(watched, mesh, capture="dynamic")
        state = step.init(params(), optim.sgd(RATE))
        state, metrics = step(state, rows(mesh.rank))
        return float(metrics["loss"]), gathered(state.params), len(saved)

    (one, plain, kept), (other, again, less) = (ranks(1, run, which)[0] for which in (0, 1))
    assert one == other
    assert_equal(plain, again)
    assert [block.runs for block in blocks] == [1, 2]
    assert less < kept


def test_random_numbers_are_those_of_a_plain_loss() -> None:
    """No key: each rank draws from its own generator as the loss would alone."""

    def loss(p: Any, x: Tensor) -> Tensor:
        keep = torch.rand(2, 3) > 0.5
        return (x[:2] @ p["w"] * keep).sum() if bool(keep.any()) else p["v"].sum()

    def run(mesh: zfunc.Mesh) -> Any:
        torch.manual_seed(7)
        step = zfunc.shard(loss, mesh, capture="dynamic")
        state = step.init(params(), optim.sgd(RATE))
        state, _ = step(state, rows(mesh.rank))
        return gathered(state.params), torch.get_rng_state()

    (after, generator) = ranks(1, run)[0]
    torch.manual_seed(7)
    oracle = dense(loss, {"shard": 1}, [[[rows(0)]]])
    assert_equal(after, oracle.tensors)
    assert torch.equal(generator, torch.get_rng_state())


def test_aux_is_apart_from_parameters_and_without_derivatives() -> None:
    def loss(p: Any, x: Tensor) -> Any:
        h = x @ p["w"]
        name = "positive" if float(h.detach().sum()) > 0 else "negative"
        return h.sum(), {"leaf": p["w"], "row": p["w"][0], "h": h, "name": name, "x": x}

    def run(mesh: zfunc.Mesh, specs: Any) -> Any:
        step = zfunc.shard(loss, mesh, capture="dynamic", has_aux=True, specs=specs)
        state = step.init(params(), optim.sgd(1.0))
        state, first = step(state, rows(mesh.rank))
        kept = first["aux"]["leaf"].clone()
        step(state, rows(mesh.rank))
        return first["aux"], kept

    for specs in (zfunc.zero(3), zfunc.zero(1)):
        for rank, (aux, kept) in enumerate(ranks(2, run, specs)):
            h = rows(rank) @ params()["w"]
            assert aux["name"] == ("positive" if float(h.sum()) > 0 else "negative")
            assert_equal(
                [aux["leaf"], aux["row"], aux["h"], kept],
                [params()["w"], params()["w"][0], h, params()["w"]],
            )
            assert not any(aux[key].requires_grad for key in ("leaf", "row", "h"))


def test_a_weighted_loss_counts_by_its_weights() -> None:
    def loss(p: Any, b: Any) -> Any:
        x, weight = b
        return loss_fn(p, x) * weight, weight

    weights = [1.0, 3.0, 0.0]

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh, capture="dynamic")
        state = step.init(params(), optim.sgd(RATE))
        state, metrics = step(state, (rows(mesh.rank), weights[mesh.rank]))
        return float(metrics["loss"]), gathered(state.params)

    oracle = Oracle(loss, params(), Sgd(RATE), axes={"shard": 3}, whole_grads=True)
    expected = oracle.step([[(rows(rank), weights[rank])] for rank in range(3)])
    for value, after in ranks(3, run):
        assert value == expected.loss
        assert_equal(after, oracle.tensors)


def test_a_loss_that_reads_no_parameter_has_gradients_of_zero() -> None:
    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(lambda p, x: x.sum() * float(x.sum() > 0), mesh, capture="dynamic")
        state = step.init(params(), optim.sgd(RATE))
        _, grads = step.value_and_grad(state.params, rows(mesh.rank))
        return gathered(grads)

    for grads in ranks(2, run):
        assert_equal(grads, [torch.zeros_like(leaf) for _, leaf in sorted(params().items())])


def test_a_forward_that_looks_at_values() -> None:
    def apply(p: Any, x: Tensor) -> Tensor:
        h = x @ p["w"]
        return h if float(h.sum()) > 0 else -h

    def run(mesh: zfunc.Mesh) -> Any:
        forward = zfunc.infer(apply, mesh)
        pieces = zfunc.scatter(params(), mesh, zfunc.Flat())
        return forward(pieces, rows(mesh.rank)), forward.explain().signatures[-1].rung

    for rank, (out, rung) in enumerate(ranks(3, run)):
        assert_equal([out], [apply(params(), rows(rank))])
        assert rung == "dynamic"
