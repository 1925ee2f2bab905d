"""Status: the one exchange at which all ranks learn whether a step may be committed.

Each rank contributes an error flag, a non-finite flag, its loss and the sum of squares of its piece
of every gradient, in float64. The sums are taken in rank order from gathered values, never by MAX
(gloo's MAX loses NaN), and what several ranks hold alike counts once. Squares are summed per leaf,
so the norm of any set of leaves follows without another message.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from zfunc import ops
from zfunc.layout import Layout
from zfunc.meshes import Mesh

__all__ = ["Report", "Verdict", "agree", "contributes", "sum_over_ranks"]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What one rank contributes."""

    failed: bool
    nonfinite: bool
    loss: float
    squares: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks know afterwards, the same everywhere.

    Attributes:
        failed_ranks: the ranks that raised.
        nonfinite: whether a loss or a gradient is not finite anywhere.
        loss: the sum of all ranks' losses.
        squares: per trainable leaf, the sum of squares of its whole gradient.
        suspect: where something is not finite: the rank, and the trainable leaf, or None for its
            loss.
    """

    failed_ranks: tuple[int, ...]
    nonfinite: bool
    loss: float
    squares: tuple[float, ...]
    suspect: tuple[int, int | None] | None = None


def report(loss: float, grads: Sequence[Tensor | None], threads: int) -> Report:
    """Measures this rank's loss and reduced gradients."""
    present = [grad for grad in grads if grad is not None]
    sums = iter(ops.sum_squares(present, threads=threads).tolist() if present else ())
    squares = tuple(0.0 if grad is None else next(sums) for grad in grads)
    finite = math.isfinite(loss) and all(map(math.isfinite, squares))
    if not finite and math.isfinite(loss):
        finite = not ops.nonfinite(present)
    return Report(False, not finite, loss, squares)


def failure(num_leaves: int) -> Report:
    """What a rank contributes that raised."""
    return Report(True, False, 0.0, (0.0,) * num_leaves)


def agree(mesh: Mesh, own: Report, layouts: Sequence[Layout]) -> Verdict:
    """Exchanges reports and sums them in rank order.

    Args:
        mesh: the mesh.
        own: this rank's report.
        layouts: how each reduced gradient is cut.

    Returns:
        The verdict.
    """
    rows = [own]
    if mesh.comm is not None:
        width = len(own.squares) + 3
        packed = struct.pack(f"<{width}d", own.failed, own.nonfinite, own.loss, *own.squares)
        rows = [
            Report(bool(row[0]), bool(row[1]), row[2], row[3:])
            for row in (struct.unpack(f"<{width}d", data) for data in mesh.comm.exchange(packed))
        ]
    squares = [0.0] * len(layouts)
    for rank, row in enumerate(rows):
        counts = {axis: contributes(mesh, rank, axis) for axis in {lay.axis for lay in layouts}}
        for leaf, layout in enumerate(layouts):
            if counts[layout.axis]:
                squares[leaf] += row.squares[leaf]
    return Verdict(
        tuple(rank for rank, row in enumerate(rows) if row.failed),
        any(row.nonfinite for row in rows),
        sum(row.loss for row in rows),
        tuple(squares),
        _suspect(rows),
    )


def _suspect(rows: Sequence[Report]) -> tuple[int, int | None] | None:
    """The first rank whose loss is not finite, else the first leaf, and the rank of its piece."""
    for rank, row in enumerate(rows):
        if not math.isfinite(row.loss):
            return rank, None
    for leaf in range(len(rows[0].squares)):
        for rank, row in enumerate(rows):
            if not math.isfinite(row.squares[leaf]):
                return rank, leaf
    return None


def contributes(mesh: Mesh, rank: int, axis: str | None) -> bool:
    """Whether a rank's piece of a leaf cut along `axis` counts: on all other axes only index 0."""
    stride = 1
    for name, size in reversed(mesh.axes.items()):
        if name != axis and rank // stride % size:
            return False
        stride *= size
    return True


def sum_over_ranks(mesh: Mesh, values: Tensor, layouts: Sequence[Layout]) -> Tensor:
    """Sums per-leaf numbers over the ranks whose piece counts, in rank order, on every rank alike.

    Args:
        mesh: the mesh.
        values: float64 of [number of leaves].
        layouts: how each leaf is cut.

    Returns:
        float64 of [number of leaves].
    """
    own = Report(False, False, 0.0, tuple(values.tolist()))
    return torch.tensor(agree(mesh, own, layouts).squares, dtype=torch.float64)
