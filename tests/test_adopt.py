"""Adopt: a state of another step becomes one for this step, element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import assert_equal, bits, gathered, ranks
from tests.oracle import Adamw, Oracle
from zfunc import optim, random, tree
from zfunc.sharded import is_sharded

HSDP = {"replica": 2, "shard": 2}


def params() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return {"w": normal(3, 5), "b": normal(5), "u": normal(5), "n": torch.arange(3)}


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return ((torch.tanh(batch @ params["w"] + params["b"]) @ params["u"]) ** 2).mean()


def rows(world: int, step: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [[torch.randn(4, 3, dtype=torch.float64, generator=generator)] for _ in range(world)]


SPECS = {
    "zero 1": zfunc.zero(1),
    "zero 2": zfunc.zero(2),
    "zero 3": zfunc.zero(3),
    "whole": zfunc.P(),
    "mixed": zfunc.Flat(min_numel=6),
    "by replica": zfunc.zero(3, "replica"),
}


@pytest.mark.parametrize("target", SPECS)
@pytest.mark.parametrize(("source", "donate"), [("zero 1", True), ("zero 3", False)])
def test_training_goes_on_as_if_nothing_had_happened(
    source: str, target: str, donate: bool
) -> None:
    oracle = Oracle(loss_fn, params(), Adamw(0.1), axes=HSDP)
    for number in range(4):
        oracle.step(rows(4, number))

    def run(mesh: zfunc.Mesh) -> Any:
        one = zfunc.shard(loss_fn, mesh, specs=SPECS[source])
        other = zfunc.shard(loss_fn, mesh, specs=SPECS[target], donate=donate)
        state = one.init(params(), optim.adamw(0.1), key=random.key(0))
        key = state.key
        for number in range(2):
            state, _ = one(state, rows(4, number)[mesh.rank][0])
        before, count = gathered(state.params), int(state.step)
        moved = other.adopt(state)
        assert_equal(gathered(moved.params), before)
        assert (int(moved.step), moved.key is key) == (count, True)
        like = other.abstract(params(), optim.adamw(0.1), key=random.key(0))
        assert tree.structure(moved) == tree.structure(like)
        for number in range(2, 4):
            moved, _ = other(moved, rows(4, number)[mesh.rank][0])
        return gathered(moved.params)

    for after in ranks(HSDP, run):
        assert_equal(after, oracle.tensors, 1e-12)


def test_newly_trained_leaves_start_at_zero_and_the_others_go_on() -> None:
    """Train w and u, then all of them, then b alone: each count is that of its own updates."""
    phases = [
        {"w": True, "b": False, "u": True, "n": True},
        True,
        {"w": False, "b": True, "u": False, "n": False},
    ]

    def run(mesh: zfunc.Mesh) -> Any:
        counts, state = [], None
        for phase, trainable in enumerate(phases):
            step = zfunc.shard(loss_fn, mesh, trainable=trainable)
            tx = optim.adamw(0.1)
            state = step.init(params(), tx) if state is None else step.adopt(state)
            for number in range(2):
                state, _ = step(state, rows(2, 2 * phase + number)[mesh.rank][0])
            found = state.opt_state[0].count
            counts.append(
                {name: int(leaf.local) for name, leaf in found.items() if leaf is not None}
            )
        return counts, gathered(state.params)

    oracle = Oracle(loss_fn, params(), Adamw(0.1), axes={"shard": 2})
    names = ["b", "n", "u", "w"]
    for phase, trainable in enumerate(phases):
        on = trainable if isinstance(trainable, dict) else dict.fromkeys(names, True)
        oracle.trainable = [on[name] and name != "n" for name in names]
        for number in range(2):
            oracle.step(rows(2, 2 * phase + number))
    for counts, after in ranks(2, run):
        assert counts == [{"u": 2, "w": 2}, {"b": 2, "u": 4, "w": 4}, {"b": 4}]
        assert_equal(after, oracle.tensors, 1e-12)


@pytest.mark.parametrize("donate", [True, False])
def test_the_old_state_is_consumed_or_kept(donate: bool) -> None:
    def run(mesh: zfunc.Mesh) -> None:
        one = zfunc.shard(loss_fn, mesh, specs=zfunc.zero(1))
        other = zfunc.shard(loss_fn, mesh, specs=zfunc.zero(2), donate=donate)
        state, batch = one.init(params(), optim.adamw(0.1)), rows(2, 0)[mesh.rank][0]
        kept = bits(state)
        moved = other.adopt(state)
        if donate:
            for use in (lambda: other.adopt(state), lambda: one(state, batch)):
                with pytest.raises(zfunc.DonatedStateError, match="adopt at step 0 consumed"):
                    use()
        other(moved, batch)
        if not donate:
            assert_equal(bits(state), kept)
            one(state, batch)

    ranks(2, run)


def test_leaves_in_the_same_layout_keep_their_buffers() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        one, other = (zfunc.shard(loss_fn, mesh, specs=zfunc.zero(3)) for _ in range(2))
        state = one.init(params(), optim.adamw(0.1))
        leaves = tree.leaves(state.params, is_leaf=is_sharded)
        before = [leaf.local.data_ptr() for leaf in leaves]
        moved = other.adopt(state)
        leaves = tree.leaves(moved.params, is_leaf=is_sharded)
        assert [leaf.local.data_ptr() for leaf in leaves] == before

    ranks(2, run)


def test_a_state_of_other_processes_is_refused() -> None:
    lone = zfunc.shard(loss_fn, zfunc.mesh()).init(params(), optim.adamw(0.1))

    def run(mesh: zfunc.Mesh) -> None:
        zfunc.shard(loss_fn, mesh).adopt(lone)

    with pytest.raises(zfunc.LayoutError, match=r"(?s)params\['b'\].*other processes.*checkpoint"):
        ranks(2, run)


def test_ranks_that_adopt_for_different_steps_are_found_out() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        one = zfunc.shard(loss_fn, mesh, specs=zfunc.zero(1))
        state = one.init(params(), optim.adamw(0.1))
        kept = bits(state)
        other = zfunc.shard(loss_fn, mesh, specs=zfunc.zero(2 + mesh.rank))
        with pytest.raises(zfunc.ProgramMismatchError, match=r"(?s)params\['b'\]"):
            other.adopt(state)
        assert_equal(bits(state), kept)
        one(state, rows(2, 0)[mesh.rank][0])

    ranks(2, run)


def test_an_error_on_one_rank_reaches_all_and_consumes_nothing() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        one = zfunc.shard(loss_fn, mesh, specs=zfunc.zero(1))
        state = one.init(params(), optim.adamw(0.1))
        kept = bits(state)
        axis = "shard" if mesh.rank else "shrad"
        other = zfunc.shard(loss_fn, mesh, specs=zfunc.zero(3, axis))
        with pytest.raises((zfunc.LayoutError, zfunc.RemoteRankError), match="shrad"):
            other.adopt(state)
        assert_equal(bits(state), kept)
        one(state, rows(2, 0)[mesh.rank][0])

    ranks(2, run)
