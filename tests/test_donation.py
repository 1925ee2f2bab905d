"""Donation as a lease: whoever holds what a step consumed gets a clear error, never other bits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import assert_equal, bits, gathered, ranks
from zfunc import optim, tree

CONSUMED = r"(?s)was donated.*a state that step 0 consumed.*donate=False"


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return ((params["w"] @ batch + params["b"]) ** 2).sum()


def make(mesh: zfunc.Mesh, **options: Any) -> tuple[zfunc.Step, zfunc.State, Tensor]:
    step = zfunc.shard(loss_fn, mesh, **options)
    params = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    return step, step.init(params, optim.adamw(0.1)), torch.arange(3.0) + mesh.rank


@pytest.mark.parametrize("specs", [zfunc.zero(1), zfunc.zero(3)], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_a_consumed_state_is_an_error_everywhere(world: int, specs: Any) -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step, old, batch = make(mesh, specs=specs)
        new, _ = step(old, batch)
        for use in (
            lambda: step(old, batch),
            lambda: step.value_and_grad(old.params, batch),
            lambda: zfunc.gather(old.params),
            lambda: tree.map(lambda x: x + 1, old),
            lambda: tree.leaves(old.opt_state),
            lambda: old.params["w"].local,
            lambda: step.adopt(old),
        ):
            with pytest.raises(zfunc.DonatedStateError, match=CONSUMED):
                use()
        step(new, batch)

    ranks(world, run)


def test_a_lease_travels_through_tree_map() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step, state, batch = make(mesh)
        same = tree.map(lambda x: x, state)
        copy = tree.map(torch.clone, state)
        kept = bits(copy)
        step(state, batch)
        with pytest.raises(zfunc.DonatedStateError, match=CONSUMED):
            step(same, batch)
        assert_equal(bits(copy), kept)
        step(copy, batch)

    ranks(2, run)


def test_rebuilding_with_other_tensors_starts_a_lease_of_its_own() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step, state, batch = make(mesh)
        moved = dataclasses.replace(state, params=tree.map(lambda x: x + 1, state.params))
        expected = gathered(moved.params)
        after, _ = step(moved, batch)
        # Its parameters were its own, the optimizer's state was that of `state`.
        assert not torch.equal(gathered(after.params)[0], expected[0])
        gathered(state.params)
        with pytest.raises(zfunc.DonatedStateError):
            step(state, batch)
        gathered(state.params)

    ranks(2, run)


def test_a_state_with_other_parameters_trains_those() -> None:
    """A step remembers what it made; what the caller put in its place counts."""

    def run(mesh: zfunc.Mesh) -> None:
        step, state, batch = make(mesh, donate=False)
        state, _ = step(state, batch)
        zeros = tree.map(torch.zeros_like, state.params)
        _, metrics = step(dataclasses.replace(state, params=zeros), batch)
        assert float(metrics["loss"]) == 0.0
        state.params["w"] = tree.map(torch.zeros_like, state.params["w"])
        state.params["b"] = tree.map(torch.zeros_like, state.params["b"])
        _, metrics = step(state, batch)
        assert float(metrics["loss"]) == 0.0

    ranks(2, run)


def test_a_state_of_another_structure_trains_that() -> None:
    """With the leaves that a step made, under other keys, or with another optimizer."""

    def run(mesh: zfunc.Mesh) -> None:
        step, state, batch = make(mesh, donate=False)
        state, _ = step(state, batch)
        renamed = {"v": state.params["b"], "w": state.params["w"]}
        with pytest.raises(zfunc.LayoutError, match=r"expected  opt_state.*'v'"):
            step(dataclasses.replace(state, params=renamed), batch)
        with pytest.raises(zfunc.LayoutError, match="optimizer's state"):
            step(dataclasses.replace(state, tx=optim.sgd(0.1)), batch)
        with pytest.raises(zfunc.LayoutError, match="takes a state"):
            step(state.params, batch)  # pyright: ignore
        step(state, batch)

    ranks(1, run)


def test_nothing_is_consumed_by_reading() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step, state, batch = make(mesh)
        kept = bits(state)
        step.value_and_grad(state.params, batch)
        zfunc.gather(state.params)
        step.lower(state, batch)
        zfunc.infer(loss_fn, mesh)(state.params, batch)
        assert_equal(bits(state), kept)
        step(state, batch)

    ranks(2, run)


def test_without_donation_the_old_state_keeps_its_bits() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step, state, batch = make(mesh, donate=False)
        kept = bits(state)
        one, _ = step(state, batch)
        assert_equal(bits(state), kept)
        other, _ = step(state, batch)
        assert_equal(bits(one), bits(other))

    ranks(2, run)


def test_a_donated_step_writes_into_the_buffers_that_it_takes() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step, state, batch = make(mesh)
        leaves = tree.leaves((state.params, state.opt_state), is_leaf=lambda x: hasattr(x, "lease"))
        before = [leaf.local.data_ptr() for leaf in leaves]
        after, _ = step(state, batch)
        leaves = tree.leaves((after.params, after.opt_state), is_leaf=lambda x: hasattr(x, "lease"))
        assert [leaf.local.data_ptr() for leaf in leaves] == before

    ranks(2, run)


def test_a_skip_consumes_the_old_lease_and_hands_on_the_buffers() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step, state, batch = make(mesh)
        kept = bits(state.params)
        after, metrics = step(state, batch * math.nan)
        assert int(metrics["skipped"]) == 1
        with pytest.raises(zfunc.DonatedStateError, match=CONSUMED):
            step(state, batch)
        assert_equal(bits(after.params), kept)
        step(after, batch)

    ranks(2, run)


def test_an_error_before_the_commit_point_consumes_nothing() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step, state, batch = make(mesh, nonfinite="raise")
        kept = bits(state)
        with pytest.raises(zfunc.NonFiniteError):
            step(state, batch * math.nan)
        with pytest.raises(RuntimeError):
            step(state, torch.ones(7))
        assert_equal(bits(state), kept)
        step(state, batch)

    ranks(2, run)


def test_init_does_not_share_the_callers_tensors() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss_fn, mesh, specs=zfunc.zero(1))
        params = {"w": torch.ones(2, 3), "b": torch.ones(2)}
        state = step.init(params, optim.sgd(0.1))
        step(state, torch.ones(3))
        assert torch.equal(params["w"], torch.ones(2, 3))

    ranks(1, run)
    ranks(2, run)


def test_the_state_of_another_step_is_refused_before_it_is_consumed() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        one, state, batch = make(mesh, specs=zfunc.zero(1))
        whole, _, _ = make(mesh, specs=zfunc.P())
        kept = bits(state)
        with pytest.raises(zfunc.LayoutError, match=r"(?s)opt_state\[0\].mu\['b'\].*Step.adopt"):
            whole(state, batch)
        sharded, _, _ = make(mesh, specs=zfunc.zero(3))
        with pytest.raises(zfunc.LayoutError, match=r"(?s)params\['b'\].*Step.adopt"):
            sharded(state, batch)
        frozen, _, _ = make(mesh, specs=zfunc.zero(1), trainable={"w": True, "b": False})
        with pytest.raises(zfunc.LayoutError, match=r"(?s)optimizer's state.*Step.adopt"):
            frozen(state, batch)
        assert_equal(bits(state), kept)
        one(state, batch)

    ranks(2, run)
