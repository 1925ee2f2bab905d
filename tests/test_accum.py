"""Micro-batches, aux and weighted losses: the objective is one mean over all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import assert_equal, gathered, integers, ranks
from tests.oracle import Oracle, Sgd
from zfunc import optim
from zfunc.program.ir import Accumulate, Gather, Program, Reduce

RATE = 2.0**-10
STAGES = [1, 2, 3]


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": integers(generator, (3, 4), torch.float32),
        "u": integers(generator, (4,), torch.float32),
    }


def mean_loss(params: Any, batch: Tensor) -> Tensor:
    return (torch.relu(batch @ params["w"]) @ params["u"]).square().mean()


def token_loss(params: Any, batch: Any) -> Any:
    """Sum and number of the tokens that count, and what was seen."""
    x, mask = batch
    each = torch.relu(x @ params["w"]) @ params["u"]
    return ((each.square() * mask).sum(), mask.sum()), {"each": each, "rows": len(x), "tag": None}


def rows(world: int, sizes: list[int]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[integers(generator, (n, 3), torch.float32) for n in sizes] for _ in range(world)]


def masked_rows(world: int, sizes: list[int], dead_rank: int | None = None) -> list[list[Any]]:
    """Rows with a mask; all of a rank's are masked if it is dead."""
    generator = torch.Generator().manual_seed(2)
    data: list[list[Any]] = []
    for rank, row in enumerate(rows(world, sizes)):
        masks = [torch.randint(0, 2, (len(x),), generator=generator).float() for x in row]
        masks = [mask * 0 if rank == dead_rank else mask for mask in masks]
        data.append(list(zip(row, masks, strict=True)))
    return data


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("sizes", [[4, 2], [8, 1, 2]], ids=str)
def test_micro_batches_of_any_shape(sizes: list[int], stage: int) -> None:
    data = rows(2, sizes)
    oracle = Oracle(mean_loss, params(), Sgd(RATE), axes={"shard": 2}, whole_grads=stage == 1)
    expected = oracle.step(data)

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(mean_loss, mesh, specs=zfunc.zero(stage), accum=len(sizes))
        state, metrics = step(step.init(params(), optim.sgd(RATE)), data[mesh.rank])
        return float(metrics["loss"]), gathered(state.params)

    for loss, after in ranks(2, run):
        assert loss == torch.tensor(expected.loss, dtype=torch.float32).item()
        assert_equal(after, oracle.tensors)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dead_rank", [None, 1])
def test_weighted_losses_divide_by_the_total_weight(stage: int, dead_rank: int | None) -> None:
    data = masked_rows(2, [4, 3], dead_rank)
    oracle = Oracle(
        token_loss, params(), Sgd(RATE), axes={"shard": 2}, has_aux=True, whole_grads=stage == 1
    )
    first = oracle.value_and_grad(data)
    expected = oracle.step(data)

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(token_loss, mesh, specs=zfunc.zero(stage), accum=2, has_aux=True)
        state = step.init(params(), optim.sgd(RATE))
        (loss, aux), grads = step.value_and_grad(state.params, data[mesh.rank])
        state, metrics = step(state, data[mesh.rank])
        return loss, aux, gathered(grads), metrics, gathered(state.params)

    for rank, (loss, aux, grads, metrics, after) in enumerate(ranks(2, run)):
        assert float(loss) == float(metrics["loss"]) == pytest.approx(expected.loss, rel=1e-6)
        assert_equal(grads, first.grads)
        assert_equal(after, oracle.tensors)
        for seen in (aux, metrics["aux"]):
            for got, wanted in zip(seen, expected.aux[rank], strict=True):
                assert torch.equal(got["each"], wanted["each"])
                assert (got["rows"], got["tag"]) == (wanted["rows"], None)


def test_a_weight_may_be_a_python_number_and_differ_between_ranks() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x, weight = batch
        return mean_loss(params, x) * weight, weight

    data = [[(rows(2, [4])[rank][0], weight)] for rank, weight in enumerate((1, 3))]
    oracle = Oracle(loss, params(), Sgd(RATE), axes={"shard": 2})
    expected = oracle.step(data)

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh)
        state, metrics = step(step.init(params(), optim.sgd(RATE)), data[mesh.rank][0])
        return float(metrics["loss"]), gathered(state.params)

    for loss_value, after in ranks(2, run):
        assert loss_value == expected.loss
        assert_equal(after, oracle.tensors)


def test_the_weight_is_a_constant() -> None:
    """A weight that depends on parameters has no gradient."""

    def loss(p: Tensor, batch: Tensor) -> Any:
        return (p * batch).sum(), (p * p).sum()

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh)
        state = step.init(torch.tensor([1.0, 1.0]), optim.sgd(0.5))
        return zfunc.gather(step.value_and_grad(state.params, torch.tensor([1.0, 3.0]))[1])

    for grads in ranks(2, run):
        assert grads.tolist() == [0.5, 1.5]


def test_unequal_batches_count_equally_without_weights() -> None:
    def run(mesh: zfunc.Mesh) -> float:
        step = zfunc.shard(lambda p, b: (p * b).mean(), mesh)
        state = step.init(torch.tensor(1.0), optim.sgd(0.5))
        batch = torch.full((1 + 3 * mesh.rank,), float(mesh.rank))
        return float(step(state, batch)[1]["loss"])

    assert ranks(2, run) == [0.5, 0.5]


def test_an_empty_mean_is_nan_and_a_skip() -> None:
    def run(mesh: zfunc.Mesh) -> tuple[float, int]:
        step = zfunc.shard(lambda p, b: (p * b).mean(), mesh)
        state = step.init(torch.tensor(1.0), optim.sgd(0.5))
        metrics = step(state, torch.ones(mesh.rank))[1]
        return float(metrics["loss"]), int(metrics["skipped"])

    for loss, skipped in ranks(2, run):
        assert math.isnan(loss) and skipped == 1


@pytest.mark.parametrize("batch", [torch.ones(2, 3), [torch.ones(2, 3)], None], ids=repr)
def test_the_number_of_micro_batches_is_checked(batch: Any) -> None:
    step = zfunc.shard(mean_loss, zfunc.mesh(), accum=2)
    state = step.init(params(), optim.sgd(RATE))
    with pytest.raises(zfunc.LayoutError, match=r"(?s)accum=2.*expected  2 of them"):
        step(state, batch)


def test_equal_micro_batches_are_captured_once_and_others_again() -> None:
    step = zfunc.shard(mean_loss, zfunc.mesh(), accum=2)
    state = step.init(params(), optim.sgd(RATE))
    for sizes, misses in (([4, 4], 1), ([4, 2], 2), ([2, 4], 3), ([4, 4], 3)):
        state, _ = step(state, rows(1, sizes)[0])
        assert step.explain().misses == misses


def lowered(stage: int, accum: int) -> Program:
    step = zfunc.shard(
        mean_loss, zfunc.abstract_mesh({"shard": 2}), specs=zfunc.zero(stage), accum=accum
    )
    batches = rows(1, [4] * accum)[0]
    return step.lower(
        step.abstract(params(), optim.sgd(RATE)), batches if accum > 1 else batches[0]
    ).program


@pytest.mark.parametrize(("stage", "reduces"), [(1, 1), (2, 3), (3, 3)])
def test_whole_gradients_are_reduced_once_and_sharded_ones_each_time(
    stage: int, reduces: int
) -> None:
    ops = lowered(stage, 3).ops
    assert sum(isinstance(op, Reduce) for op in ops) == reduces
    assert sum(isinstance(op, Accumulate) for op in ops) == 2
    gathers = sum(isinstance(op, Gather) for op in ops)
    assert gathers == (1 if stage == 3 else 0), "an ample budget gathers a leaf once a step"
