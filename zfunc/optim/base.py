"""The protocol of optimizers: a transform is a pure pair `(init, update)` over trees.

A transform is a frozen, value-equal dataclass, so it prints, pickles, compares, and can be matched
onto a fused kernel. `params` and `updates` are trees of tensors or of `Sharded` leaves, None where
a leaf is frozen; a transform works on this rank's pieces, element by element. What must be known of
whole leaves comes in through `UpdateInfo`.

Ownership: `update` may overwrite the buffers of the `updates` and of the `state` that it is given
(a caller that goes on using them clones them first); it never writes `params`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from zfunc import ops, tree

__all__ = [
    "ChangedInfo",
    "LocalInfo",
    "Rated",
    "Rates",
    "Transform",
    "UpdateInfo",
    "check_range",
    "global_norm",
    "learning_rate_of",
]

Rates = float | dict[str, float] | None


class UpdateInfo(Protocol):
    """What a transform may ask about whole leaves; a frozen value."""

    def sum_squares(self, updates: Any) -> Tensor:
        """Sums the squares of each leaf over all ranks, replicated leaves once.

        An implementation that knows the sums of the raw gradients may recognise them by tensor
        identity. So whoever hands changed values on in the same tensors wraps the info in
        `ChangedInfo`, as `chain` does.

        Args:
            updates: a tree like `params`.

        Returns:
            float64 [number of leaves], in canonical order.
        """
        ...

    def whole(self, updates: Any) -> Iterator[Tensor]:
        """Gathers one leaf after the other; the next one is on its way while one is used.

        Every rank calls it and exhausts it. What it yields may share memory with the leaf and is
        read only; it is of use until the next one is asked for.

        Args:
            updates: a tree like `params`.

        Yields:
            The whole leaf, in its shape, in canonical order.
        """
        ...


class Transform(Protocol):
    """A pure `(init, update)` pair; see the module's docstring for who owns which buffer."""

    def init(self, params: Any) -> Any:
        """Makes the state for a tree of parameters: a tree of NamedTuples.

        State that is shaped like the parameters is made by `tree.map`, so that it has their layout.
        """
        ...

    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Turns updates (at first: gradients) into better ones.

        Args:
            updates: a tree like `params`.
            state: what `init` or the last `update` returned.
            params: the parameters from before the update.
            info: what is known of whole leaves.

        Returns:
            The new updates and the new state.
        """
        ...


@runtime_checkable
class Rated(Protocol):
    """A transform that can say which learning rate its next update uses."""

    def learning_rate_of(self, state: Any) -> Rates:
        """The rate of the next update from that state."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class LocalInfo:
    """The info of a process that holds every leaf whole.

    Attributes:
        threads: the number of CPU threads for sums.

    Example:
        >>> import torch
        >>> LocalInfo().sum_squares({"w": torch.tensor([3.0, 4.0])})
        tensor([25.], dtype=torch.float64)
    """

    threads: int = 1

    def sum_squares(self, updates: Any) -> Tensor:
        """Sums the squares of each leaf's tensor."""
        return ops.sum_squares(tree.leaves(updates), threads=self.threads)

    def whole(self, updates: Any) -> Iterator[Tensor]:
        """Yields each leaf."""
        yield from tree.leaves(updates)


@dataclasses.dataclass(frozen=True, slots=True)
class ChangedInfo:
    """The info for updates whose tensors may hold other values than when `info` last saw them.

    It asks through aliases, which no one can take for the tensors of the raw gradients.

    Attributes:
        info: where the sums come from.
    """

    info: UpdateInfo

    def sum_squares(self, updates: Any) -> Tensor:
        """Sums the squares of each leaf as it is now."""
        return self.info.sum_squares(tree.map(Tensor.detach, updates))

    def whole(self, updates: Any) -> Iterator[Tensor]:
        """Gathers each leaf as it is now."""
        return self.info.whole(updates)


def global_norm(updates: Any, *, info: UpdateInfo) -> float:
    """The 2-norm of all elements of all leaves, over all ranks.

    Args:
        updates: a tree like `params`.
        info: where the sums of squares come from.

    Returns:
        The norm, 0 for a tree without leaves.

    Example:
        >>> import torch
        >>> global_norm([torch.tensor(3.0), torch.tensor(4.0)], info=LocalInfo())
        5.0
    """
    return math.sqrt(sum(info.sum_squares(updates).tolist()))


def learning_rate_of(tx: Transform, state: Any) -> Rates:
    """The learning rate that `tx.update` uses when it is called with that state.

    Args:
        tx: any transform.
        state: its state.

    Returns:
        The rate; a dict by label for `partition`, by position for a chain of several rated
        transforms, by "label/position" where one is in the other; None where there is none.

    Example:
        >>> from zfunc import optim
        >>> tx = optim.sgd(0.1)
        >>> learning_rate_of(tx, tx.init({}))
        0.1
    """
    return tx.learning_rate_of(state) if isinstance(tx, Rated) else None


def check_range(name: str, value: float, holds: bool, expected: str) -> None:
    """Raises `ValueError` for a hyperparameter out of its range."""
    if not holds:
        raise ValueError(f"{name}={value} must be {expected}")
