"""Interval packing: which copies to keep between two uses when not all of them fit.

An interval occupies its bytes between two uses of an item and gains the bytes that need not be
gathered again. Maximising the gain under a capacity per position is unsplittable flow on a path
(Bonsma, Schulz and Wiese 2014, "A constant factor approximation algorithm for unsplittable flow on
paths"), NP-hard for unequal sizes. A dozen intervals in competition are solved by trying every
subset; more of them by a few greedy orders and a local search that trades kept intervals for
others. The search is bounded by counts, never by a clock: every rank finds the same answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Interval", "pack"]

# The most intervals whose subsets are all tried, and the evictions that a local search may try.
_EXACT = 12
_STEPS = 2_000


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A span between two uses of an item, over which it may be kept.

    Attributes:
        start: the position of the first use.
        stop: the position of the next use, after `start`.
        nbytes: what keeping it occupies at every position strictly between.
        gain: bytes that need not be gathered again when it is kept.
    """

    start: int
    stop: int
    nbytes: int
    gain: int


def pack(intervals: Sequence[Interval], capacity: Sequence[int]) -> frozenset[int]:
    """Chooses the intervals to keep.

    Args:
        intervals: the candidates.
        capacity: free bytes at each position, uses already subtracted.

    Returns:
        Indices of kept intervals. Their bytes fit everywhere, and no other one with a gain fits
        besides.

    Raises:
        ValueError: an interval outside the positions, or a negative capacity, size or gain.

    Example:
        >>> a, b = Interval(0, 3, nbytes=4, gain=4), Interval(1, 2, nbytes=2, gain=2)
        >>> sorted(pack([a, b], capacity=[9, 5, 5, 9])), sorted(pack([a, b], capacity=[9, 3, 3, 9]))
        ([0, 1], [1])
    """
    _check(intervals, capacity)
    table = _Table(*(np.array(column, np.int64) for column in _columns(intervals)))
    room = np.array(capacity, np.int64)
    sure, open_ = _sort_out(table, room)
    kept = _Packing(table, room)
    for index in sure:
        kept.add(index)
    if open_.size:
        kept = (_enumerate if open_.size <= _EXACT else _search)(kept, open_)
    return frozenset(np.flatnonzero(kept.kept).tolist())


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """The intervals by column; `first` is the first position inside."""

    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    gain: NDArray[np.int64]


class _Packing:
    """A set of kept intervals, and what it leaves free at each position."""

    def __init__(self, table: _Table, room: NDArray[np.int64]):
        self.table = table
        self.free = room.copy()
        self.kept = np.zeros(table.first.size, bool)
        self.witness = table.first.copy()
        self.gain = 0
        self.area = 0

    def copy(self) -> _Packing:
        """An independent copy."""
        other = _Packing(self.table, self.free)
        other.kept, other.witness = self.kept.copy(), self.witness.copy()
        other.gain, other.area = self.gain, self.area
        return other

    @property
    def score(self) -> tuple[int, int]:
        """What is better compares greater: gain, then bytes times positions left free."""
        return self.gain, -self.area

    def add(self, index: int) -> None:
        """Keeps an interval, whether it fits or not."""
        self._change(index, 1)

    def drop(self, index: int) -> None:
        """Keeps an interval no longer."""
        self._change(index, -1)

    def _change(self, index: int, sign: int) -> None:
        t = self.table
        first, stop, nbytes = int(t.first[index]), int(t.stop[index]), int(t.nbytes[index])
        self.free[first:stop] -= sign * nbytes
        self.kept[index] = sign > 0
        self.gain += sign * int(t.gain[index])
        self.area += sign * nbytes * (stop - first)

    def shortage(self, index: int) -> NDArray[np.int64]:
        """The positions at which an interval that is not kept lacks room."""
        first = self.table.first[index]
        inside = self.free[first : self.table.stop[index]]
        return np.flatnonzero(inside < self.table.nbytes[index]) + first

    def fill(self, order: NDArray[np.int64]) -> None:
        """Keeps what fits, in the order given.

        An interval's witness is a position where it lacked room when last looked at: while it still
        does, the interval need not be looked at again.
        """
        t = self.table
        likely = ~self.kept[order] & (self.free[self.witness[order]] >= t.nbytes[order])
        for index in order[likely].tolist():
            first = int(t.first[index])
            inside = self.free[first : int(t.stop[index])]
            lowest = int(inside.argmin())
            if inside[lowest] >= t.nbytes[index]:
                self.add(index)
            else:
                self.witness[index] = first + lowest


def _check(intervals: Sequence[Interval], capacity: Sequence[int]) -> None:
    if min(capacity, default=0) < 0:
        raise ValueError(f"capacity {min(capacity)} at position {capacity.index(min(capacity))}")
    for index, it in enumerate(intervals):
        if not (0 <= it.start < it.stop < len(capacity) and min(it.nbytes, it.gain) >= 0):
            raise ValueError(f"interval {index} does not fit {len(capacity)} positions: {it}")


def _columns(intervals: Sequence[Interval]) -> list[list[int]]:
    rows = [(it.start + 1, it.stop, it.nbytes, it.gain) for it in intervals]
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], [], []]


def _demand(table: _Table, which: NDArray[np.bool_], positions: int) -> NDArray[np.int64]:
    """Bytes occupied at each position if all of `which` were kept."""
    steps = np.zeros(positions + 1, np.int64)
    np.add.at(steps, table.first[which], table.nbytes[which])
    np.add.at(steps, table.stop[which], -table.nbytes[which])
    return np.cumsum(steps[:-1])


def _sort_out(table: _Table, room: NDArray[np.int64]) -> tuple[list[int], NDArray[np.int64]]:
    """Splits off the intervals that fit whatever else is kept, and those that never fit."""
    free = (table.first >= table.stop) | (table.nbytes == 0)
    hopeless = np.zeros_like(free)
    for index in np.flatnonzero(~free).tolist():
        low = room[table.first[index] : table.stop[index]].min()
        hopeless[index] = table.nbytes[index] > low
    tight = np.concatenate([[0], np.cumsum(_demand(table, ~hopeless, room.size) > room)])
    contended = ~free & (tight[np.maximum(table.stop, table.first)] > tight[table.first])
    sure = ~hopeless & ~contended
    return np.flatnonzero(sure).tolist(), np.flatnonzero(~hopeless & contended)


def _enumerate(base: _Packing, which: NDArray[np.int64]) -> _Packing:
    """Compares every subset of a few intervals."""
    table = base.table
    edges = np.unique(np.concatenate([table.first[which], table.stop[which]]))
    room = np.minimum.reduceat(base.free, edges)[:-1]
    covers = (table.first[which, None] <= edges[:-1]) & (edges[:-1] < table.stop[which, None])
    subsets = np.arange(1 << which.size)[:, None] >> np.arange(which.size) & 1
    fits = (subsets @ (covers * table.nbytes[which, None]) <= room).all(axis=1)
    subsets = subsets[fits]
    area = subsets @ (table.nbytes * (table.stop - table.first))[which]
    winner = subsets[np.lexsort((area, -(subsets @ table.gain[which])))[0]]
    best = base.copy()
    for index in which[winner > 0].tolist():
        best.add(index)
    return best


def _orders(table: _Table, which: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """A few orders in which to keep intervals greedily; ties by index."""
    length = (table.stop - table.first)[which]
    nbytes, gain = table.nbytes[which], table.gain[which]
    keys = (
        length * nbytes / np.maximum(gain, 0.5),
        -gain / length,
        -gain,
        length * nbytes,
        table.stop[which],
    )
    return [which[np.lexsort((-gain, key))] for key in keys]


def _search(base: _Packing, which: NDArray[np.int64]) -> _Packing:
    """Fills greedily in several orders and improves each result; the first of the best wins."""
    orders = _orders(base.table, which)
    starts: list[_Packing] = []
    for order in orders:
        start = base.copy()
        start.fill(order)
        starts.append(start)
    starts.sort(key=lambda start: start.score, reverse=True)
    steps = _STEPS
    best = starts[0]
    for start in starts:
        improved, steps = _improve(start, orders, steps)
        if improved.score > best.score:
            best = improved
    return best


def _improve(
    packing: _Packing, orders: list[NDArray[np.int64]], steps: int
) -> tuple[_Packing, int]:
    """Trades kept intervals for others until nothing helps or the steps are used up."""
    density, largest = orders[1], orders[2]
    stuck = False
    while not stuck:
        stuck = True
        for index in largest[~packing.kept[largest]].tolist():
            for preference in range(3):
                if packing.kept[index] or steps <= 0:
                    break
                trial, evicted = _swap(packing, index, preference, density)
                steps -= 1 + evicted
                if trial.score > packing.score:
                    packing, stuck = trial, False
        stuck = stuck or steps <= 0
    return packing, steps


def _swap(
    packing: _Packing, index: int, preference: int, which: NDArray[np.int64]
) -> tuple[_Packing, int]:
    """Evicts what is in the way of one interval, keeps it, and fills up again."""
    table = packing.table
    trial = packing.copy()
    evicted: list[int] = []
    short = trial.shortage(index)
    near = which[trial.kept[which]]
    first, stop = (np.searchsorted(short, edge[near]) for edge in (table.first, table.stop))
    near, covered = near[stop > first], (stop - first)[stop > first]
    lack = (table.nbytes[index] - trial.free[short]).max()
    helps = np.minimum(table.nbytes[near], lack) * covered
    gain, length = table.gain[near], (table.stop - table.first)[near]
    key = (gain / helps, gain, -length)[preference]
    for victim in near[np.lexsort((near, key))].tolist():
        if not short.size:
            break
        if ((table.first[victim] <= short) & (short < table.stop[victim])).any():
            evicted.append(victim)
            trial.drop(victim)
            short = trial.shortage(index)
    trial.add(index)
    trial.fill(np.array(evicted[::-1], np.int64))
    trial.fill(which)
    return trial, len(evicted)
