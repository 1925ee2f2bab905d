"""Which ranks share an axis: the groups that collectives run in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

__all__ = ["AxisGroup", "axis_groups", "single_axis"]


@dataclasses.dataclass(frozen=True, slots=True)
class AxisGroup:
    """The ranks along one axis that agree in all others, seen from one of them.

    Attributes:
        axis: the name of the axis.
        ranks: mesh ranks, in the order of the axis.
        index: this rank's place among them.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def peers(self) -> tuple[int, ...]:
        """The places of the others, from the next one on, so that not all send to one at once."""
        return tuple((self.index + step) % self.size for step in range(1, self.size))


def axis_groups(axes: Mapping[str, int], rank: int) -> dict[str, AxisGroup]:
    """Finds the group of one rank along every axis; the last axis varies fastest over ranks.

    Example:
        >>> axis_groups({"replica": 2, "shard": 2}, 1)["replica"].ranks
        (1, 3)
    """
    groups = {}
    stride = math.prod(axes.values())
    for axis, size in axes.items():
        stride //= size
        index = rank // stride % size
        first = rank - index * stride
        ranks = tuple(first + place * stride for place in range(size))
        groups[axis] = AxisGroup(axis, ranks, index)
    return groups


def single_axis(n_or_axes: int | Mapping[str, int]) -> dict[str, int]:
    """Names the one axis of a bare number of ranks."""
    return {"shard": n_or_axes} if isinstance(n_or_axes, int) else dict(n_or_axes)
