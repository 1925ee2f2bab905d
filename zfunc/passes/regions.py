"""Regions: the ops and storages of a captured program as the remat pass sees them on one level.

Forward code as captured is level 0, what level k computes again is the forward code of level
k + 1. An op that was captured in nested regions belongs on level k to the one that is k deep.
"""

from __future__ import annotations

import dataclasses

from zfunc.program.ir import Collective, Compute, Op

__all__ = ["BACKWARD", "Group", "Step"]

BACKWARD = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """An op with what the pass knows of it.

    Attributes:
        op: the op.
        level: 0 for forward code as captured, k for a copy made on level k, -1 for backward code.
        origin: the place of the op, or of the op that it copies, in the captured program.
        reads: values read.
        writes: values made.
        mutates: values written in place.
    """

    op: Op
    level: int
    origin: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    mutates: tuple[int, ...]

    def home(self, level: int) -> str | None:
        """The region that it belongs to on a level, if it is forward code of that level."""
        if self.level != level or not isinstance(self.op, Compute | Collective):
            return None
        return self.op.regions[level] if len(self.op.regions) > level else None

    def region(self, level: int) -> str | None:
        """The same of an op that can be repeated: a collective is not."""
        return self.home(level) if isinstance(self.op, Compute) else None


@dataclasses.dataclass(slots=True)
class Group:
    """The values of one storage.

    Attributes:
        home: the region where the storage is made; None outside of all regions.
        region: the same, if what makes it can be repeated.
        chain: places of the ops that make, view or write it.
        last_write: place of the last op that writes it in place.
        kept: whether it is read as it is instead of being computed again.
        is_result: whether something outside its region needs it, so that it is there anyway.
    """

    home: str | None = None
    region: str | None = None
    chain: list[int] = dataclasses.field(default_factory=list)
    last_write: int = -1
    kept: bool = False
    is_result: bool = False
