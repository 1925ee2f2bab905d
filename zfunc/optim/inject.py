"""Hyperparameters in the state: numbers that can be set between steps, with no new capture.

A transform is a frozen value and its numbers are static; `inject_hyperparams` makes it anew for
each update, from numbers that its state keeps. As in optax, but for schedules: those stay with the
transform, which counts its own updates.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from zfunc.optim.base import Rates, Transform, UpdateInfo, learning_rate_of
from zfunc.optim.combine import Chain, MaskedState, PartitionState, masked, partition
from zfunc.optim.lists import tensors_of
from zfunc.optim.multi import multi_steps
from zfunc.sharded import Sharded

__all__ = ["InjectHyperparamsState", "Injected", "inject_hyperparams", "set_hyperparams"]


class InjectHyperparamsState(NamedTuple):
    """The numbers, 0-d float64 CPU tensors by name, and the state of the transform."""

    hyperparams: dict[str, Tensor]
    inner: Any


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Injected:
    """A transform whose numbers are in its state; made by `inject_hyperparams`.

    Attributes:
        inner_factory: makes the transform.
        static_args: the arguments that are never in the state.
        arguments: all arguments of the factory, by name.
    """

    inner_factory: Callable[..., Transform]
    static_args: tuple[str, ...]
    arguments: Mapping[str, Any] = dataclasses.field(hash=False)

    def __repr__(self) -> str:
        name = getattr(self.inner_factory, "__name__", repr(self.inner_factory))
        static = f", {self.static_args!r}" if self.static_args else ""
        given = ", ".join(f"{key}={value!r}" for key, value in self.arguments.items())
        return f"inject_hyperparams({name}{static})({given})"

    @property
    def hyperparams(self) -> dict[str, float]:
        """The numbers that the state begins with."""
        return {
            name: value
            for name, value in self.arguments.items()
            if name not in self.static_args and _is_number(value)
        }

    def made(self, values: Mapping[str, float]) -> Transform:
        """The transform with some numbers in the place of those that it was made with.

        Raises:
            ValueError: a number that the transform does not take, or that makes another one of it.
        """
        tx = self._with(values)
        if _skeleton(tx) != _skeleton(self._with({})):
            raise ValueError(
                f"{dict(values)} makes {tx!r}, which has other parts than the transform before:"
                " name the argument that decides that in static_args"
            )
        return tx

    def now(self, state: InjectHyperparamsState) -> Transform:
        """The transform with the numbers of a state."""
        names, tensors = list(state.hyperparams), tensors_of(state.hyperparams)
        values = zip(names, torch.stack(tensors).tolist() if tensors else [], strict=True)
        return self._with(dict(values))

    def init(self, params: Any) -> InjectHyperparamsState:
        """Makes the state of the transform, and the numbers."""
        numbers = {name: _number(value) for name, value in sorted(self.hyperparams.items())}
        return InjectHyperparamsState(numbers, self._with({}).init(params))

    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Updates by the transform of the state's numbers."""
        updates, inner = self.now(state).update(updates, state.inner, params, info=info)
        return updates, state._replace(inner=inner)

    def learning_rate_of(self, state: Any) -> Rates:
        """The rate of the transform of the state's numbers."""
        return learning_rate_of(self.now(state), state.inner)

    def _with(self, values: Mapping[str, float]) -> Transform:
        """Calls the factory; what it was given as an int stays one while it is whole."""
        arguments = dict(self.arguments)
        for name, value in values.items():
            whole = isinstance(arguments[name], int) and float(value).is_integer()
            arguments[name] = int(value) if whole else float(value)
        return self.inner_factory(**arguments)


def inject_hyperparams(
    inner_factory: Callable[..., Transform], static_args: str | Collection[str] = ()
) -> Callable[..., Injected]:
    """Moves the numbers that a transform is made with into its state.

    Every argument that is an int or a float, defaults included, becomes a 0-d float64 tensor in
    `state.hyperparams`, which `set_hyperparams` sets and a checkpoint keeps; a bool, a schedule or
    anything else stays as it is. Fused kernels stay in use. Name and arguments are optax's.

    Args:
        inner_factory: makes a transform, from arguments that can be given by name. A function of a
            module compares and pickles, a lambda does not.
        static_args: the names of arguments to leave alone.

    Returns:
        A function with the arguments of `inner_factory` that makes the transform. It raises
        `TypeError` for arguments that do not fit, `ValueError` for those that the factory refuses.

    Raises:
        ValueError: a name in `static_args` that is no argument.

    Example:
        >>> from zfunc import optim
        >>> tx = inject_hyperparams(optim.sgd)(0.5)
        >>> state = tx.init({})
        >>> state.hyperparams["learning_rate"]
        tensor(0.5000, dtype=torch.float64)
        >>> state = state._replace(hyperparams={"learning_rate": torch.tensor(0.25)})
        >>> optim.learning_rate_of(tx, state)
        0.25
    """
    signature = inspect.signature(inner_factory)
    names = (static_args,) if isinstance(static_args, str) else tuple(sorted(static_args))
    for name in names:
        if name not in signature.parameters:
            raise ValueError(f"static_args has {name!r}, not one of {list(signature.parameters)}")

    def make(*args: Any, **kwargs: Any) -> Injected:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        tx = Injected(inner_factory, names, dict(bound.arguments))
        tx.made(tx.hyperparams)
        return tx

    return make


class _Trained(Protocol):
    """What `set_hyperparams` needs of a state: a dataclass with these two."""

    @property
    def tx(self) -> Any: ...

    @property
    def opt_state(self) -> Any: ...


_State = TypeVar("_State", bound=_Trained)


def set_hyperparams(state: _State, label: str | None = None, /, **hyperparams: float) -> _State:
    """Sets numbers that `inject_hyperparams` keeps in the state, for the next steps.

    Nothing is captured, planned or copied anew. Call it on every rank with the same numbers: what
    is replicated is not compared.

    Args:
        state: a training `State`; it shares its tensors with the returned one, of which a step
            consumes both.
        label: only what `partition` applies under that label; None for everywhere.
        hyperparams: the new numbers by name.

    Returns:
        The state with the new numbers.

    Raises:
        ValueError: a name that no injected transform has, or a number that it does not take.

    Example:
        >>> import zfunc
        >>> from zfunc import optim
        >>> step = zfunc.shard(lambda params, batch: (params["w"] * batch).sum(), zfunc.mesh())
        >>> tx = inject_hyperparams(optim.adamw)(3e-4)
        >>> state = step.init({"w": torch.ones(2)}, tx)
        >>> state = set_hyperparams(state, learning_rate=1e-4)
        >>> state, metrics = step(state, torch.ones(2))
        >>> float(metrics["lr"])
        0.0001
    """
    wanted = {name: float(value) for name, value in hyperparams.items()}
    found: set[str] = set()
    known: set[str] = set()

    def replace(tx: Any, old: Any, on: bool) -> Any:
        if isinstance(tx, Injected):
            known.update(tx.hyperparams if on else ())
            here = {name: wanted[name] for name in tx.hyperparams if on and name in wanted}
            found.update(here)
            inner = replace(tx.made(here), old.inner, on)
            new = {name: _like(old.hyperparams[name], value) for name, value in here.items()}
            return InjectHyperparamsState(old.hyperparams | new, inner)
        if isinstance(tx, Chain):
            links = zip(tx.transforms, old, strict=True)
            return tuple(replace(link, part, on) for link, part in links)
        if isinstance(tx, masked):
            return MaskedState(replace(tx.inner, old.inner, on))
        if isinstance(tx, multi_steps):
            return old._replace(inner=replace(tx.opt, old.inner, on))
        if isinstance(tx, partition):
            parts = {
                name: replace(part, old.inner[name], on or name == label)
                for name, part in tx.transforms.items()
            }
            return PartitionState(parts)
        return old

    opt_state = replace(state.tx, state.opt_state, label is None)
    if missing := set(wanted) - found:
        where = "" if label is None else f" under the label {label!r}"
        raise ValueError(
            f"no injected transform{where} has {sorted(missing)}: set one of {sorted(known)}, or"
            " make the transform with inject_hyperparams"
        )
    return dataclasses.replace(state, opt_state=opt_state)  # pyright: ignore[reportArgumentType]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _skeleton(part: Any) -> Any:
    """Which transforms a transform is made of, whatever their numbers."""
    if isinstance(part, Mapping):
        return {name: _skeleton(value) for name, value in part.items()}
    if isinstance(part, tuple):
        return tuple(map(_skeleton, part))
    if dataclasses.is_dataclass(part):
        values = (getattr(part, field.name) for field in dataclasses.fields(part))
        return type(part), *map(_skeleton, values)
    return None


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def _like(old: Any, value: float) -> Any:
    """A number wrapped as the old one was."""
    return Sharded(_number(value), old.layout) if isinstance(old, Sharded) else _number(value)
