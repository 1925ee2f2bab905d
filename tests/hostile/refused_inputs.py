"""Batches, parameters, options and states that are refused: on every rank, for all or for one."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zfunc
from tests.hostile.case import RATE, ints
from tests.hostile.refusal import Refusal, loss_fn, refused
from tests.hostile.trees import forward, mlp, rows
from zfunc import optim, tree
from zfunc.errors import (
    BudgetError,
    DonatedStateError,
    LayoutError,
    NonFiniteError,
    ProgramMismatchError,
    TreeMismatchError,
)

MODULE = nn.Linear(4, 4).double()

# Batches.


def batch_refused(
    error: type[Exception], *texts: str, only: int | None = None, **options: Any
) -> Callable[[Callable[[], Any]], Refusal]:
    """A refusal of the batch that the function below it makes, on all ranks or one."""

    def make(batch: Callable[[], Any]) -> Refusal:
        def attempt(mesh: zfunc.Mesh, state: zfunc.State) -> None:
            bad = only is None or mesh.rank == only
            step = zfunc.shard(loss_fn, mesh, **options)
            step(state, batch() if bad else rows(mesh.rank, 0))

        return Refusal(attempt, error, texts, only)

    return make


WRONG_DEVICE = ("batch['x']", "wrong device", "cpu", "meta", ".to('cpu')")


@batch_refused(LayoutError, *WRONG_DEVICE)
def a_batch_on_the_wrong_device() -> Any:
    return {"x": ints(1, 2, 4).to("meta")}


@batch_refused(LayoutError, *WRONG_DEVICE, only=1)
def a_batch_on_the_wrong_device_on_one_rank() -> Any:
    return {"x": ints(1, 2, 4).to("meta")}


@batch_refused(LayoutError, "batch['x']", "ndarray", "torch.from_numpy")
def a_batch_of_numpy_arrays() -> Any:
    return {"x": ints(1, 2, 4).numpy()}


@batch_refused(LayoutError, "batch", "UserDict", "tensor")
def a_batch_that_is_no_tree() -> Any:
    return collections.UserDict(x=ints(1, 2, 4))


@batch_refused(LayoutError, "batch['x']", "sparse")
def a_sparse_batch() -> Any:
    return {"x": ints(1, 2, 4).to_sparse()}


@dataclasses.dataclass(frozen=True)
class Example:
    """Not registered as a node of trees."""

    x: Tensor


@batch_refused(LayoutError, "batch", "Example", "register_node")
def a_batch_of_an_unregistered_dataclass() -> Any:
    return Example(ints(1, 2, 4))


@batch_refused(KeyError, "'x'")
def a_key_that_is_missing() -> Any:
    return {"y": ints(1, 2, 4)}


@batch_refused(LayoutError, "batch['x']", "no values", "lower()")
def a_batch_of_shapes() -> Any:
    return {"x": zfunc.ShapeDtype((2, 4), torch.float64)}


@refused(LayoutError, "state", "no values", "lower()")
def a_state_of_shapes(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    step = zfunc.shard(loss_fn, mesh)
    step(step.abstract(mlp(), optim.sgd(RATE)), rows(mesh.rank, 0))


@refused(LayoutError, "params['a']", "no values", "lower()")
def parameters_of_shapes(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    step = zfunc.shard(loss_fn, mesh)
    step.value_and_grad(step.abstract(mlp(), optim.sgd(RATE)).params, rows(mesh.rank, 0))


@refused(ProgramMismatchError, "key: [", "rank 1", least=2)
def keys_that_differ_between_ranks(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    key = zfunc.random.key(mesh.rank)
    zfunc.shard(loss_fn, mesh).init(mlp(), optim.sgd(RATE), key=key)


@refused(DonatedStateError, "params['a']", "donated", only=1)
def a_gather_of_what_one_rank_has_donated(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    mine = _copy(state)
    other = zfunc.shard(loss_fn, mesh)(mine, rows(mesh.rank, 0))[0]
    zfunc.gather(mine.params if mesh.rank == 1 else other.params)


@batch_refused(KeyError, "'x'", only=0)
def a_key_that_is_missing_on_one_rank() -> Any:
    return {"y": ints(1, 2, 4)}


@batch_refused(RuntimeError, "[2, 5] X [4, 3]", only=1)
def a_batch_of_the_wrong_shape_on_one_rank() -> Any:
    return {"x": ints(1, 2, 5)}


@batch_refused(LayoutError, "accum=2", "2 of them", "micro-batches", accum=2)
def micro_batches_of_another_number() -> Any:
    return [rows(0, 0)] * 3


@batch_refused(NonFiniteError, "params[", "not finite", nonfinite="raise")
def a_nan_that_must_be_raised() -> Any:
    return {"x": ints(1, 2, 4) * float("nan")}


# Parameters, options and states.


def init_refused(error: type[Exception], *texts: str, least: int = 1, **options: Any) -> Any:
    """A refusal of the parameters that the function below it makes."""

    def make(params: Callable[[int], Any]) -> Refusal:
        def attempt(mesh: zfunc.Mesh, state: zfunc.State) -> None:
            del state
            zfunc.shard(loss_fn, mesh, **options).init(params(mesh.rank), optim.sgd(RATE))

        return Refusal(attempt, error, texts, least=least)

    return make


@init_refused(LayoutError, "names an axis", "'model'", "params['a']", specs=zfunc.Flat("model"))
def a_spec_that_names_a_missing_axis(rank: int) -> Any:
    return mlp()


@init_refused(TreeMismatchError, "specs", "prefix", specs={"a": zfunc.P(), "b": zfunc.P()})
def specs_that_are_no_prefix(rank: int) -> Any:
    return mlp()


@init_refused(TreeMismatchError, "trainable", "prefix", trainable={"a": True, "z": False})
def a_choice_of_leaves_that_is_no_prefix(rank: int) -> Any:
    return mlp()


@init_refused(LayoutError, "params['a']", "Example", "register_node")
def an_unregistered_dataclass(rank: int) -> Any:
    return {"a": Example(ints(1, 2))} | {"w": ints(1, 3)}


@init_refused(LayoutError, "params['m']", "Linear", "register_node")
def a_module_as_a_leaf(rank: int) -> Any:
    return {"m": MODULE, "w": ints(1, 3)}


@init_refused(LayoutError, "params['a']", "ndarray", "tensor")
def parameters_of_numpy(rank: int) -> Any:
    return mlp() | {"a": ints(1, 3).numpy()}


@init_refused(LayoutError, "params['a']", "sparse")
def a_sparse_parameter(rank: int) -> Any:
    return mlp() | {"a": ints(1, 3, 3).to_sparse()}


@init_refused(LayoutError, "params['a']", "meta", "whole tensors")
def a_parameter_without_data(rank: int) -> Any:
    return mlp() | {"a": ints(1, 3).to("meta")}


@init_refused(TreeMismatchError, "no tensor leaf")
def parameters_without_tensors(rank: int) -> Any:
    return {"a": 3, "b": None}


@init_refused(LayoutError, "params['b']", "differs between ranks", "seed every rank alike", least=2)
def parameters_that_differ_between_ranks(rank: int) -> Any:
    return mlp() | {"b": ints(rank, 3)}


def _budget(capture: str) -> Refusal:
    def attempt(mesh: zfunc.Mesh, state: zfunc.State) -> None:
        small = zfunc.Prefetch(live_bytes=100)
        zfunc.shard(loss_fn, mesh, prefetch=small, capture=capture)(state, rows(mesh.rank, 0))

    return Refusal(attempt, BudgetError, ("live_bytes", "at least", "100", "Prefetch("), least=2)


a_budget_that_is_too_small = _budget("auto")
a_budget_that_is_too_small_for_the_dynamic_rung = _budget("dynamic")


@refused(LayoutError, "the loss takes a key", "init(..., key=")
def a_key_that_the_state_lacks(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    def loss(p: Any, b: Any, *, key: Tensor) -> Tensor:
        return forward(p, b["x"]).sum()

    zfunc.shard(loss, mesh)(state, rows(mesh.rank, 0))


def _copy(state: zfunc.State) -> zfunc.State:
    return tree.map(torch.clone, state)


@refused(DonatedStateError, "params['a']", "donated", "donate=False")
def a_state_after_its_donation(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    mine = _copy(state)
    step = zfunc.shard(loss_fn, mesh)
    step(mine, rows(mesh.rank, 0))
    step(mine, rows(mesh.rank, 1))


@refused(DonatedStateError, "params['a']", "donated", "donate=False")
def a_state_after_its_donation_through_tree_map(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    mine = _copy(state)
    other = tree.map(lambda x: x, mine)
    step = zfunc.shard(loss_fn, mesh)
    step(mine, rows(mesh.rank, 0))
    step(other, rows(mesh.rank, 1))


@refused(LayoutError, "params['a']", "tensor math", "zfunc.gather")
def a_piece_in_tensor_math(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    print(torch.ones(4, 4).double() @ state.params["a"])


@refused(LayoutError, "params['a']", "laid out", "Step.adopt")
def a_state_of_another_layout(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    zfunc.shard(loss_fn, mesh, specs=zfunc.zero(2))(state, rows(mesh.rank, 0))
