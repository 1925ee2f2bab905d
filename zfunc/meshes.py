"""Meshes: named axes of ranks, and the one protocol through which ranks exchange tensors.

A `Mesh` is a value: names and sizes of axes, the place of this rank in them, and (unless it is
abstract) a `Comm`. Two meshes are equal when axes, sizes and processes are equal; a communicator is
not part of the comparison. Nothing here talks to a network: `zfunc.comm` builds meshes that do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zfunc.errors import LayoutError, explain
from zfunc.hardware import Hardware, measure_hardware

__all__ = ["Comm", "Handle", "Hardware", "Mesh", "abstract_mesh", "chunk_numel", "shard_range"]


class Handle(Protocol):
    """A collective in flight. It owns its buffers until it has been awaited."""

    def wait(self) -> None:
        """Blocks until the results are complete; raises `RankLostError` when a rank is gone."""
        ...


class Comm(Protocol):
    """The collectives of one rank over the axes of one mesh.

    Tensors are 1-D and contiguous. A full tensor of n elements over an axis of size w is cut into
    w pieces of `chunk_numel(n, w)` elements, the last ones shorter or empty; nothing is padded.
    All ranks of the axis make the same calls in the same order. Lists travel together.
    """

    def gather(self, axis: str, shards: Sequence[Tensor], fulls: Sequence[Tensor]) -> Handle:
        """Writes every rank's shard into its place of each full tensor."""
        ...

    def reduce(self, axis: str, fulls: Sequence[Tensor], shards: Sequence[Tensor]) -> Handle:
        """Sums this rank's piece of each full tensor over the axis, in rank order."""
        ...

    def all_reduce(self, axis: str, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> Handle:
        """Sums each tensor over the axis, in rank order, on every rank alike."""
        ...

    def exchange(self, payload: bytes) -> list[bytes]:
        """Gives every rank of the mesh all payloads, in rank order (control group, blocking)."""
        ...

    def drain(self) -> None:
        """Waits for, or abandons, everything in flight."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Mesh:
    """Named axes of ranks, seen from one of them.

    Attributes:
        axes: name -> size, the last axis varying fastest over ranks.
        rank: this rank, `0 <= rank < size`; 0 on an abstract mesh.
        processes: the launcher's rank of each mesh rank; empty on an abstract mesh.
        device: where this rank computes.
        hw: the rates that the cost model reads.
        comm: this rank's collectives; None on an abstract mesh and on a mesh of one rank.

    Example:
        >>> mesh = abstract_mesh({"replica": 2, "shard": 4})
        >>> mesh.size, mesh.index("shard")
        (8, 0)
    """

    axes: dict[str, int]
    rank: int = 0
    processes: tuple[int, ...] = ()
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    hw: Hardware = dataclasses.field(default_factory=Hardware)
    comm: Comm | None = dataclasses.field(default=None, repr=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    @property
    def is_abstract(self) -> bool:
        """Whether the mesh has names and sizes only."""
        return not self.processes

    def index(self, axis: str) -> int:
        """This rank's place along an axis.

        Raises:
            LayoutError: the mesh has no such axis.
        """
        self.axis_size(axis)
        stride = 1
        for name, size in reversed(list(self.axes.items())):
            if name == axis:
                return self.rank // stride % size
            stride *= size
        raise AssertionError(axis)

    def axis_size(self, axis: str) -> int:
        """The number of ranks along an axis.

        Raises:
            LayoutError: the mesh has no such axis.
        """
        if axis not in self.axes:
            raise LayoutError(
                explain(
                    f"axis {axis!r} is not an axis of the mesh",
                    expected=f"one of {tuple(self.axes)}",
                    got=repr(axis),
                    do="name an axis that the mesh was made with",
                )
            )
        return self.axes[axis]

    def measure(self) -> Mesh:
        """Measures this mesh's rates and returns it with the agreed `Hardware`.

        Every rank times a matrix product, a copy and a gather; the slowest rank's figures are
        taken everywhere, so that all ranks plan alike. Takes about a second; every rank must call.

        Returns:
            An equal mesh whose `hw` holds measured rates.
        """
        return dataclasses.replace(self, hw=measure_hardware(self))

    def __deepcopy__(self, _: object) -> Mesh:
        return self

    def _identity(self) -> tuple[object, ...]:
        return (tuple(self.axes.items()), self.processes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __str__(self) -> str:
        return "mesh[" + " ".join(f"{name}:{size}" for name, size in self.axes.items()) + "]"


def abstract_mesh(axes: Mapping[str, int], *, hw: Hardware = Hardware()) -> Mesh:  # noqa: B008
    """Makes a mesh of names and sizes only: programs for any world on one CPU.

    Args:
        axes: name -> size.
        hw: the rates that the cost model reads.

    Returns:
        A mesh with rank 0 and no communicator.

    Raises:
        LayoutError: no axis, or a size below 1.

    Example:
        >>> abstract_mesh({"shard": 512}).size
        512
    """
    check_axes(axes)
    return Mesh(dict(axes), hw=hw)


def check_axes(axes: Mapping[str, int]) -> None:
    """Raises `LayoutError` unless `axes` names at least one axis, each of size 1 or more."""
    bad = [name for name, size in axes.items() if not isinstance(size, int) or size < 1]
    if bad or not axes:
        raise LayoutError(
            explain(
                f"axes {dict(axes)} do not describe a mesh",
                expected="a name and a size of at least 1 for each axis",
                do="write for example {'replica': 2, 'shard': 4}",
            )
        )


def chunk_numel(numel: int, size: int) -> int:
    """The elements of one piece of a tensor cut for `size` ranks; the last may be shorter."""
    return -(-numel // size)


def shard_range(numel: int, size: int, index: int) -> tuple[int, int]:
    """The half-open range of elements that rank `index` of an axis holds.

    Example:
        >>> [shard_range(5, 4, i) for i in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    chunk = chunk_numel(numel, size)
    return min(index * chunk, numel), min((index + 1) * chunk, numel)
