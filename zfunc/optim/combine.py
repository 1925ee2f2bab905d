"""Transforms made of transforms: one after the other, on some leaves, by label.

`chain` is associative and `identity()` is its unit, as values: chains within chains are flattened
and a chain of one is that one, so `chain(a, chain(b, c)) == chain(chain(a, b), c)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from zfunc.optim.base import ChangedInfo, Rates, Transform, UpdateInfo, learning_rate_of
from zfunc.optim.masks import Labels, Mask, keep, merge, resolve_labels, resolve_mask

__all__ = [
    "Chain",
    "MaskedState",
    "PartitionState",
    "chain",
    "identity",
    "masked",
    "partition",
]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Chain:
    """Transforms applied one after the other; made by `chain`, which flattens.

    Attributes:
        transforms: none of them a `Chain`.
    """

    transforms: tuple[Transform, ...]

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.transforms))})"

    def init(self, params: Any) -> tuple[Any, ...]:
        """Makes a tuple of the states."""
        return tuple(tx.init(params) for tx in self.transforms)

    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Hands the updates from one transform to the next."""
        states, changed = [], ChangedInfo(info)
        for tx, old in zip(self.transforms, state, strict=True):
            updates, new = tx.update(updates, old, params, info=info)
            states.append(new)
            info = changed
        return updates, tuple(states)

    def learning_rate_of(self, state: Any) -> Rates:
        """The rate of the transform that has one; a dict by position if several have."""
        pairs = zip(self.transforms, state, strict=True)
        rates = [learning_rate_of(tx, old) for tx, old in pairs]
        known = {str(i): rate for i, rate in enumerate(rates) if rate is not None}
        return next(iter(known.values())) if len(known) == 1 else _flat(known)


def chain(*transforms: Transform) -> Transform:
    """Applies transforms one after the other, the first to the gradients.

    Args:
        transforms: any number of them.

    Returns:
        A transform whose state is the tuple of their states (of one: that one itself).

    Example:
        >>> from zfunc import optim
        >>> optim.chain(optim.clip_by_global_norm(1.0), optim.scale(-0.1))
        chain(clip_by_global_norm(max_norm=1.0), scale(step_size=-0.1))
    """
    flat: list[Transform] = []
    for tx in transforms:
        flat.extend(tx.transforms if isinstance(tx, Chain) else [tx])
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))


def identity() -> Transform:
    """The transform that changes nothing: the chain of none.

    Example:
        >>> from zfunc import optim
        >>> optim.chain(optim.identity(), optim.scale(2.0)) == optim.scale(2.0)
        True
    """
    return Chain(())


class MaskedState(NamedTuple):
    """The state of a masked transform; it has None for the leaves that are not marked."""

    inner: Any


@dataclasses.dataclass(frozen=True, slots=True)
class masked:
    """Applies a transform to the marked leaves and hands the others on as they are.

    Args:
        inner: the transform.
        mask: a tree of bools (a prefix tree will do), or a function of a leaf's path ("h/0/w") and
            whole shape.

    Example:
        >>> from zfunc import optim
        >>> tx = optim.masked(optim.trace(0.9), lambda path, shape: len(shape) > 1)
    """

    inner: Transform
    mask: Mask = dataclasses.field(hash=False)

    def init(self, params: Any) -> MaskedState:
        """Makes state for the marked leaves.

        Raises:
            TreeMismatchError: the mask does not fit the parameters.
        """
        return MaskedState(self.inner.init(keep(params, resolve_mask(self.mask, params))))

    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Updates the marked leaves."""
        marks = resolve_mask(self.mask, params)
        part, inner = self.inner.update(
            keep(updates, marks), state.inner, keep(params, marks), info=info
        )
        return merge(updates, [part], [0 if mark else -1 for mark in marks]), MaskedState(inner)

    def learning_rate_of(self, state: Any) -> Rates:
        """The rate of the inner transform."""
        return learning_rate_of(self.inner, state.inner)


class PartitionState(NamedTuple):
    """The state of each label's transform; it has None for the leaves of other labels."""

    inner: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class partition:
    """Applies to each leaf the transform that its label names.

    A norm that one of them takes is the norm of its own leaves.

    Args:
        transforms: label -> transform.
        labels: a tree of labels (a prefix tree will do), or a function of a leaf's path ("h/0/w")
            and whole shape.

    Example:
        >>> from zfunc import optim
        >>> tx = optim.partition(
        ...     {"matrix": optim.sgd(0.1), "rest": optim.adam(0.01)},
        ...     lambda path, shape: "matrix" if len(shape) == 2 else "rest",
        ... )
    """

    transforms: Mapping[str, Transform] = dataclasses.field(hash=False)
    labels: Labels = dataclasses.field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", dict(self.transforms))

    def split(self, nodes: Any, labels: list[str]) -> dict[str, Any]:
        """One tree for each label, with None for the leaves of the others."""
        return {name: keep(nodes, [label == name for label in labels]) for name in self.transforms}

    def init(self, params: Any) -> PartitionState:
        """Makes state for the leaves of each label.

        Raises:
            TreeMismatchError: the labels do not fit the parameters, or one has no transform.
        """
        parts = self.split(params, resolve_labels(self.labels, params, self.transforms))
        return PartitionState({name: tx.init(parts[name]) for name, tx in self.transforms.items()})

    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Updates the leaves of each label."""
        labels = resolve_labels(self.labels, params, self.transforms)
        grads, leaves = self.split(updates, labels), self.split(params, labels)
        inner, parts = {}, []
        for name, tx in self.transforms.items():
            part, inner[name] = tx.update(grads[name], state.inner[name], leaves[name], info=info)
            parts.append(part)
        names = list(self.transforms)
        return merge(updates, parts, list(map(names.index, labels))), PartitionState(inner)

    def learning_rate_of(self, state: Any) -> Rates:
        """The rate of each label that has one."""
        pairs = self.transforms.items()
        return _flat({name: learning_rate_of(tx, state.inner[name]) for name, tx in pairs})


def _flat(rates: Mapping[str, Rates]) -> Rates:
    """One dict of rates, without what has none; None for nothing."""
    flat: dict[str, float] = {}
    for name, rate in rates.items():
        if isinstance(rate, dict):
            flat |= {f"{name}/{inner}": value for inner, value in rate.items()}
        elif rate is not None:
            flat[name] = rate
    return flat or None
