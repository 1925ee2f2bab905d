"""Interval packing against optima found in other ways: by caching, by subsets, by Belady's rule."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.packing import MODES, Trace, draw_trace, gathered_bytes, least_gathered_bytes
from zfunc.passes.intervals import Interval, pack


def _gain_of_best_subset(intervals: Sequence[Interval], capacity: Sequence[int]) -> int:
    """Tries every subset."""
    best = 0
    for subset in range(1 << len(intervals)):
        chosen = [it for i, it in enumerate(intervals) if subset >> i & 1]
        if _fits(chosen, capacity):
            best = max(best, sum(it.gain for it in chosen))
    return best


def _fits(chosen: Sequence[Interval], capacity: Sequence[int]) -> bool:
    return all(
        sum(it.nbytes for it in chosen if it.start < t < it.stop) <= room
        for t, room in enumerate(capacity)
    )


def _belady_misses(accesses: Sequence[int], slots: int) -> int:
    """Misses of the farthest-next-use rule, optimal for equal sizes (Belady 1966)."""
    misses, resident = 0, set()
    for at, item in enumerate(accesses):
        misses += item not in resident
        resident.add(item)
        if len(resident) > slots:
            rest = accesses[at + 1 :]
            others = resident - {item}
            resident.remove(max(others, key=lambda x: rest.index(x) if x in rest else len(rest)))
    return misses


@st.composite
def _problems(draw: st.DrawFn) -> tuple[list[Interval], list[int]]:
    positions = draw(st.integers(2, 9))
    capacity = draw(st.lists(st.integers(0, 12), min_size=positions, max_size=positions))
    intervals = []
    for _ in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, positions - 2))
        stop = draw(st.integers(start + 1, positions - 1))
        nbytes, gain = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        intervals.append(Interval(start, stop, nbytes, gain))
    return intervals, capacity


@given(_problems())
def test_no_subset_gains_more(problem: tuple[list[Interval], list[int]]) -> None:
    intervals, capacity = problem
    kept = pack(intervals, capacity)
    assert _fits([intervals[i] for i in kept], capacity)
    gain = sum(intervals[i].gain for i in kept)
    assert gain == _gain_of_best_subset(intervals, capacity)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10), st.data())
def test_a_short_trace_gathers_no_byte_too_many(accesses: list[int], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=6, max_size=6))
    largest = max(sizes[item] for item in accesses)
    budget = data.draw(st.integers(largest, largest + sum(sizes)))
    trace = Trace(tuple(accesses), tuple(sizes), budget)
    assert gathered_bytes(trace) == least_gathered_bytes(trace)


@pytest.mark.parametrize("mode", MODES)
def test_random_traces_and_palindromes_are_packed_optimally(mode: str) -> None:
    rnd = random.Random(0)
    ratios = []
    for _ in range(500):
        trace = draw_trace(rnd, mode, accesses=10)
        ratios.append(gathered_bytes(trace) / least_gathered_bytes(trace))
    assert statistics.mean(ratios) == 1.0 and max(ratios) == 1.0


@pytest.mark.parametrize("mode", MODES)
def test_longer_traces_are_packed_almost_optimally(mode: str) -> None:
    rnd = random.Random(1)
    ratios = []
    for _ in range(60):
        trace = draw_trace(rnd, mode, accesses=24)
        ratios.append(gathered_bytes(trace) / least_gathered_bytes(trace))
    assert statistics.mean(ratios) < 1.005 and max(ratios) <= 1.05


@pytest.mark.parametrize("seed", range(5))
def test_equal_sizes_are_packed_as_well_as_by_beladys_rule(seed: int) -> None:
    rnd = random.Random(seed)
    accesses = tuple(rnd.randrange(40) for _ in range(400))
    trace = Trace(accesses, (7,) * 40, 7 * 12)
    assert gathered_bytes(trace) == 7 * _belady_misses(accesses, 12)


@pytest.mark.parametrize("seed", range(3))
def test_a_large_packing_fits_and_leaves_no_room_unused(seed: int) -> None:
    rnd = random.Random(seed)
    intervals = []
    for _ in range(300):
        start = rnd.randrange(498)
        size = rnd.choice([1, 1, 2, 3, 50, 100])
        intervals.append(Interval(start, rnd.randrange(start + 1, 500), size, size))
    capacity = [rnd.randrange(400) for _ in range(500)]
    kept = pack(intervals, capacity)
    chosen = [intervals[i] for i in kept]
    assert _fits(chosen, capacity)
    for i, it in enumerate(intervals):
        assert i in kept or not _fits([*chosen, it], capacity)
    assert pack(intervals, capacity) == kept


def test_what_fits_is_kept_at_once() -> None:
    intervals = [Interval(0, 4, 5, 5), Interval(1, 3, 3, 0), Interval(2, 3, 9, 9)]
    assert pack(intervals, [0, 5, 8, 5, 0]) == {0, 1, 2}
    assert pack([], []) == frozenset()


def test_an_interval_without_inner_positions_costs_nothing() -> None:
    assert pack([Interval(0, 1, 1 << 60, 1)], [0, 0]) == {0}


def test_the_lower_index_wins_a_tie() -> None:
    twins = [Interval(0, 2, 4, 4)] * 3
    assert pack(twins, [0, 4, 0]) == {0}
    many = [Interval(0, 2, 4, 4)] * 20
    assert pack(many, [0, 12, 0]) == {0, 1, 2}


@pytest.mark.parametrize(
    "intervals, capacity",
    [
        ([Interval(1, 1, 1, 1)], [9, 9]),
        ([Interval(0, 2, 1, 1)], [9, 9]),
        ([Interval(0, 1, -1, 1)], [9, 9]),
        ([Interval(0, 1, 1, -1)], [9, 9]),
        ([Interval(0, 1, 1, 1)], [9, -1]),
    ],
)
def test_nonsense_is_refused(intervals: list[Interval], capacity: list[int]) -> None:
    with pytest.raises(ValueError, match=r"position|interval 0"):
        pack(intervals, capacity)
