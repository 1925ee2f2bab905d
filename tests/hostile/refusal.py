"""A refusal: an attempt that must raise on every rank, say why, and leave no trace."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

import zfunc
from tests.harness import gathered
from tests.hostile.case import RATE
from tests.hostile.trees import forward, mlp, rows
from zfunc import optim

__all__ = ["Refusal", "attempt_by_name", "loss_fn", "loss_refused", "refusals_of", "refused"]

Attempt = Callable[[zfunc.Mesh, zfunc.State], Any]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An attempt and its error.

    Attributes:
        attempt: called with the mesh and a state on every rank; must raise.
        error: the type.
        texts: what the message must say.
        only: the one rank that is at fault; the others get `RemoteRankError` with its message.
        least: the smallest world in which there is something to refuse.
    """

    attempt: Attempt
    error: type[Exception]
    texts: tuple[str, ...]
    only: int | None = None
    least: int = 1


def refused(
    error: type[Exception], *texts: str, only: int | None = None, least: int = 1
) -> Callable[[Attempt], Refusal]:
    """Makes a `Refusal` of the attempt below it."""
    return lambda attempt: Refusal(attempt, error, texts, only, least)


def loss_fn(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()


def attempt_by_name(mesh: zfunc.Mesh, module: str, name: str) -> Any:
    """On one rank: a good step, the attempt, a good step."""
    this: Refusal = getattr(importlib.import_module(module), name)
    step = zfunc.shard(loss_fn, mesh)
    state = step.init(mlp(), optim.sgd(RATE))
    state, _ = step(state, rows(mesh.rank, 0))
    seen = ("nothing", "")
    try:
        this.attempt(mesh, state)
    except Exception as error:
        seen = (type(error).__name__, str(error))
    state, _ = step(state, rows(mesh.rank, 1))
    return seen, gathered(state.params)


def loss_refused(
    error: type[Exception], *texts: str, **options: Any
) -> Callable[[Callable[..., Any]], Refusal]:
    """A refusal of the loss below it, by a step and by `value_and_grad` alike."""

    def make(loss: Callable[..., Any]) -> Refusal:
        def attempt(mesh: zfunc.Mesh, state: zfunc.State) -> None:
            step = zfunc.shard(loss, mesh, **options)
            try:
                step.value_and_grad(state.params, rows(mesh.rank, 0))
            except error as first:
                try:
                    step(state, rows(mesh.rank, 0))
                except error as second:
                    assert str(first).splitlines()[1:] == str(second).splitlines()[1:]
                    raise

        return Refusal(attempt, error, texts)

    return make


def refusals_of(module: ModuleType) -> dict[str, Refusal]:
    """The refusals of a module, by name."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Refusal)}
