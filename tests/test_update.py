"""The update: clip over ranks, schedules and counts, masks, frozen leaves, what is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import assert_equal, bits, gathered, integers, ranks
from tests.oracle import Adamw, Oracle, Sgd
from zfunc import optim, schedules, tree
from zfunc.program.ir import Reduce, Update

HSDP = {"replica": 2, "shard": 2}


def params() -> Any:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": integers(generator, (3, 5)),
        "b": integers(generator, (5,)),
        "head": {"u": integers(generator, (5, 2)), "steps": torch.arange(3)},
    }


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    h = torch.relu(batch @ params["w"] + params["b"])
    return ((h @ params["head"]["u"]) ** 2).mean()


def rows(world: int, step: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(100 + step)
    return [[integers(generator, (4, 3))] for _ in range(world)]


def train(mesh: zfunc.Mesh, tx: Any, data: Any, options: Any) -> tuple[list[Any], list[Tensor]]:
    """Metrics of every step and the whole leaves at the end, on one rank."""
    step = zfunc.shard(loss_fn, mesh, **options)
    state = step.init(params(), tx)
    seen = []
    for batches in data:
        state, metrics = step(state, batches[mesh.rank][0])
        seen.append(metrics)
    return seen, gathered(state.params)


@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 3}, HSDP], ids=str)
@pytest.mark.parametrize("specs", [zfunc.zero(1), zfunc.zero(3), zfunc.Flat(min_numel=6)], ids=str)
def test_clip_counts_every_element_of_every_rank_once(axes: Any, specs: Any) -> None:
    world = math.prod(axes.values())
    data = [rows(world, step) for step in range(2)]
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1))
    oracle = Oracle(loss_fn, params(), Adamw(0.1), axes=axes, clip=0.5)
    expected = [oracle.step(batches) for batches in data]
    for metrics, after in ranks(axes, train, tx, data, {"specs": specs}):
        for got, result in zip(metrics, expected, strict=True):
            assert float(got["grad_norm"]) == pytest.approx(result.norm, rel=1e-12)
            assert float(got["grad_norm_clipped"]) == pytest.approx(0.5, rel=1e-12)
        assert_equal(after, oracle.tensors, 1e-12)


def test_a_clip_that_does_not_bind_changes_no_bit() -> None:
    data = [rows(2)]
    clipped = optim.chain(optim.clip_by_global_norm(1e9), optim.sgd(0.1))
    one = ranks(2, train, clipped, data, {})
    other = ranks(2, train, optim.sgd(0.1), data, {})
    for (metrics, after), (_, expected) in zip(one, other, strict=True):
        assert_equal(after, expected)
        assert torch.equal(metrics[0]["grad_norm"], metrics[0]["grad_norm_clipped"])


def test_a_clip_after_another_transform_has_the_norm_of_what_it_gets() -> None:
    tx = optim.chain(optim.scale(4.0), optim.clip_by_global_norm(0.5), optim.sgd(0.25))
    data = [rows(4)]
    for metrics, after in ranks(HSDP, train, tx, data, {"specs": zfunc.Flat(min_numel=6)}):
        oracle = Oracle(loss_fn, params(), Sgd(0.25), axes=HSDP, clip=0.5)
        oracle.step(data[0])
        assert_equal(after, oracle.tensors, 1e-12)
        assert float(metrics[0]["grad_norm_clipped"]) == float(metrics[0]["grad_norm"])


def test_masks_and_labels_see_whole_shapes() -> None:
    tx = optim.adamw(0.1, weight_decay=0.5, mask=lambda path, shape: len(shape) > 1)
    decays = [False, False, True, True]  # b, head/steps, head/u, w
    data = [rows(3, step) for step in range(2)]
    oracle = Oracle(
        loss_fn, params(), Adamw(0.1, weight_decay=0.5), axes={"shard": 3}, decays=decays
    )
    for batches in data:
        oracle.step(batches)
    for _, after in ranks(3, train, tx, data, {}):
        assert_equal(after, oracle.tensors, 1e-12)


def test_partition_reports_a_rate_per_label() -> None:
    tx = optim.partition(
        {"matrix": optim.sgd(0.5), "vector": optim.sgd(schedules.linear(0.25, 0.0, 4))},
        lambda path, shape: "matrix" if len(shape) == 2 else "vector",
    )
    data = [rows(2, step) for step in range(2)]
    for metrics, _ in ranks(2, train, tx, data, {}):
        rates = [{name: float(rate) for name, rate in m["lr"].items()} for m in metrics]
        assert rates == [{"matrix": 0.5, "vector": 0.25}, {"matrix": 0.5, "vector": 0.1875}]


def test_frozen_leaves_have_no_gradient_and_no_state() -> None:
    def run(mesh: zfunc.Mesh) -> Any:
        trainable = {"w": False, "b": True, "head": True}
        step = zfunc.shard(loss_fn, mesh, trainable=trainable)
        state = step.init(params(), optim.adamw(0.1))
        moments = state.opt_state[0].mu
        assert moments["w"] is None and moments["head"]["steps"] is None
        batch = rows(2)[mesh.rank][0]
        _, grads = step.value_and_grad(state.params, batch)
        assert grads["w"] is None and grads["head"]["steps"] is None
        before = bits(state.params["w"])
        program = step.lower(state, batch).program
        moved = [op for op in program.ops if isinstance(op, Reduce | Update)]
        paths = {program.leaves[i].path for op in moved for i in op.leaves}
        assert paths == {"params['b']", "params['head']['u']"}
        state, _ = step(state, batch)
        assert_equal(bits(state.params["w"]), before)
        return gathered(state.params)

    trainable = [True, True, True, False]
    oracle = Oracle(loss_fn, params(), Adamw(0.1), axes={"shard": 2}, trainable=trainable)
    oracle.step(rows(2))
    for after in ranks(2, run):
        assert_equal(after, oracle.tensors, 1e-12)


def test_a_leaf_that_the_loss_does_not_use_decays() -> None:
    def loss(p: Any, batch: Tensor) -> Tensor:
        return (p["used"] * batch).sum()

    start = {"used": torch.ones(3).double(), "idle": torch.ones(5).double()}
    data = [[[torch.arange(3.0).double() + r] for r in range(2)] for _ in range(3)]
    oracle = Oracle(loss, start, Adamw(0.1, weight_decay=0.5), axes={"shard": 2})
    for batches in data:
        oracle.step(batches)

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh)
        state = step.init(start, optim.adamw(0.1, weight_decay=0.5))
        _, grads = step.value_and_grad(state.params, data[0][mesh.rank][0])
        for batches in data:
            state, _ = step(state, batches[mesh.rank][0])
        return gathered(grads), gathered(state.params)

    for grads, after in ranks(2, run):
        assert torch.equal(grads[0], torch.zeros(5).double())
        assert_equal(after, oracle.tensors, 1e-12)
        assert float(oracle.tensors[0][0]) < 1


def poisoned(world: int, rank: int) -> list[list[Tensor]]:
    """A batch that is NaN on one rank only."""
    data = rows(world)
    data[rank][0] = data[rank][0] * math.nan
    return data


@pytest.mark.parametrize("specs", [zfunc.zero(1), zfunc.zero(3)], ids=str)
@pytest.mark.parametrize("donate", [True, False])
def test_a_skip_leaves_the_state_bitwise_and_does_not_count(specs: Any, donate: bool) -> None:
    tx = optim.chain(optim.scale_by_adam(), optim.scale_by_schedule(schedules.linear(-0.5, 0.0, 4)))

    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss_fn, mesh, specs=specs, donate=donate)
        state = step.init(params(), tx)
        state, _ = step(state, rows(2)[mesh.rank][0])
        kept = bits(state.params) + bits(state.opt_state)
        state, metrics = step(state, poisoned(2, 1)[mesh.rank][0])
        assert int(metrics["skipped"]) == 1
        assert math.isnan(float(metrics["loss"]))
        assert int(state.step) == 2
        assert_equal(bits(state.params) + bits(state.opt_state), kept)
        state, metrics = step(state, rows(2, 1)[mesh.rank][0])
        assert int(metrics["skipped"]) == 0
        counts = [int(leaf.local) for leaf in tree.leaves(state.opt_state[0].count, is_leaf=_whole)]
        assert counts == [2, 2, 2]
        assert int(tree.leaves(state.opt_state[1], is_leaf=_whole)[0].local) == 2

    ranks(2, run)


def _whole(node: Any) -> bool:
    return isinstance(node, zfunc.Sharded)


def test_a_schedule_counts_applied_updates() -> None:
    rate = schedules.linear(0.5, 0.0, 4)
    tx = optim.adamw(rate, weight_decay=0.0)
    data = [rows(2, 0), poisoned(2, 0), rows(2, 1), poisoned(2, 1), rows(2, 2)]
    oracle = Oracle(loss_fn, params(), Adamw(rate, weight_decay=0.0), axes={"shard": 2})
    expected = [oracle.step(batches) for batches in data]
    assert [result.skipped for result in expected] == [False, True, False, True, False]
    for metrics, after in ranks(2, train, tx, data, {}):
        assert [bool(m["skipped"]) for m in metrics] == [r.skipped for r in expected]
        assert [float(m["lr"]) for m in metrics] == [0.5, 0.375, 0.375, 0.25, 0.25]
        assert_equal(after, oracle.tensors, 1e-12)


def test_raise_leaves_a_valid_state_on_every_rank() -> None:
    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss_fn, mesh, nonfinite="raise")
        state = step.init(params(), optim.sgd(2.0**-8))
        with pytest.raises(zfunc.NonFiniteError, match=r"step 0 is not finite.*params\['b'\]"):
            step(state, poisoned(2, 1)[mesh.rank][0])
        state, _ = step(state, rows(2)[mesh.rank][0])
        return gathered(state.params)

    oracle = Oracle(loss_fn, params(), Sgd(2.0**-8), axes={"shard": 2})
    oracle.step(rows(2))
    for after in ranks(2, run):
        assert_equal(after, oracle.tensors)


def test_ignore_applies_what_is_not_finite() -> None:
    data = [poisoned(2, 1)]
    oracle = Oracle(loss_fn, params(), Sgd(0.5), axes={"shard": 2}, ignore_nonfinite=True)
    oracle.step(data[0])
    for metrics, after in ranks(2, train, optim.sgd(0.5), data, {"nonfinite": "ignore"}):
        assert int(metrics[0]["skipped"]) == 0
        for got, expected in zip(after, oracle.tensors, strict=True):
            assert torch.equal(got, expected) or bool(expected.isnan().all() & got.isnan().all())
        assert after[0].isnan().all()


def test_an_infinite_gradient_of_a_finite_loss_is_a_skip() -> None:
    def loss(p: Tensor, batch: Tensor) -> Tensor:
        return torch.sqrt(p * batch).sum()

    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss, mesh)
        state = step.init(torch.ones(4), optim.sgd(0.1))
        batch = torch.ones(4)
        batch[3] = 0.0 if mesh.rank == 1 else 1.0
        state, metrics = step(state, batch)
        assert math.isfinite(float(metrics["loss"]))
        assert int(metrics["skipped"]) == 1
        assert torch.equal(zfunc.gather(state.params), torch.ones(4))

    ranks(2, run)


def test_large_finite_gradients_are_applied() -> None:
    """The sum of their squares overflows, they do not."""

    def loss(p: Tensor, batch: Tensor) -> Tensor:
        return (p * batch).sum()

    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss, mesh)
        state = step.init(torch.ones(3).double(), optim.sgd(2.0**-600))
        state, metrics = step(state, torch.full((3,), 2.0**600, dtype=torch.float64))
        assert int(metrics["skipped"]) == 0
        assert torch.equal(zfunc.gather(state.params), torch.zeros(3).double())

    ranks(2, run)


@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
def test_a_total_weight_of_zero_is_a_skip(nonfinite: str) -> None:
    def loss(p: Tensor, batch: Any) -> Any:
        x, weight = batch
        return (p * x).sum(), weight

    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss, mesh, nonfinite=nonfinite)
        state = step.init(torch.ones(3).double(), optim.sgd(0.5))
        kept = bits(state.params)
        state, metrics = step(state, (torch.ones(3).double(), torch.tensor(0.0)))
        assert int(metrics["skipped"]) == 1
        assert_equal(bits(state.params), kept)

    ranks(2, run)


def test_the_generic_optimizer_and_the_fused_one_agree() -> None:
    fused = optim.adamw(0.1, weight_decay=0.5)
    generic = optim.chain(optim.scale(1.0), fused)
    data = [rows(2, step) for step in range(3)]
    one, other = (ranks(2, train, tx, data, {}) for tx in (fused, generic))
    for (_, after), (_, expected) in zip(one, other, strict=True):
        assert_equal(after, expected, 1e-14)


def test_an_optimizer_without_leaves_to_train() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss_fn, mesh, trainable=False)
        state = step.init(params(), optim.adamw(0.1))
        kept = bits(state.params)
        state, metrics = step(state, rows(2)[mesh.rank][0])
        assert_equal(bits(state.params), kept)
        assert (int(state.step), float(metrics["grad_norm"])) == (1, 0.0)

    ranks(2, run)
