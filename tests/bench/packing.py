"""How close interval packing comes to the least bytes that must be gathered, and how long it takes.

Run `python -m tests.bench.packing`. Traces are accesses to items of some sizes; the optimum is
found by dynamic programming over what is resident after each access, which knows nothing of
intervals.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import NamedTuple

from zfunc.passes.intervals import Interval, pack

__all__ = ["MODES", "Trace", "draw_trace", "gathered_bytes", "least_gathered_bytes"]

MODES = ("equal", "unequal", "skewed")


class Trace(NamedTuple):
    """Accesses to items, the bytes of each item, and the bytes that may be resident."""

    accesses: tuple[int, ...]
    sizes: tuple[int, ...]
    budget: int


def draw_trace(rnd: random.Random, mode: str, *, accesses: int) -> Trace:
    """A random trace, two in five of them a palindrome (forward, then backward)."""
    items = rnd.randint(3, 6)
    half = [rnd.randrange(items) for _ in range(accesses // 2)]
    palindrome = rnd.random() < 0.4
    rest = half[::-1] if palindrome else [rnd.randrange(items) for _ in half]
    choose = {
        "equal": lambda: 1,
        "unequal": lambda: rnd.randint(1, 10),
        "skewed": lambda: rnd.choice([1, 1, 2, 3, 50, 100]),
    }[mode]
    sizes = tuple(choose() for _ in range(items))
    used = {*half, *rest}
    largest, total = max(sizes[i] for i in used), sum(sizes[i] for i in used)
    return Trace((*half, *rest), sizes, rnd.randint(largest, total))


def gathered_bytes(trace: Trace) -> int:
    """Bytes gathered when the reuse intervals are packed."""
    last: dict[int, int] = {}
    intervals = []
    for at, item in enumerate(trace.accesses):
        size = trace.sizes[item]
        if item in last:
            intervals.append(Interval(last[item], at, size, size))
        last[item] = at
    capacity = [trace.budget - trace.sizes[item] for item in trace.accesses]
    saved = sum(intervals[i].gain for i in pack(intervals, capacity))
    return sum(trace.sizes[item] for item in trace.accesses) - saved


def least_gathered_bytes(trace: Trace) -> int:
    """The fewest bytes that any choice of what stays resident gathers."""
    best = {0: 0}
    for at, item in enumerate(trace.accesses):
        size, bit = trace.sizes[item], 1 << item
        later = set(trace.accesses[at + 1 :])
        after: dict[int, int] = {}
        for resident, cost in best.items():
            cost += 0 if resident & bit else size
            others = resident & ~bit
            keep = others
            while True:
                held = [i for i in range(len(trace.sizes)) if keep >> i & 1]
                if size + sum(trace.sizes[i] for i in held) <= trace.budget:
                    state = sum(1 << i for i in held if i in later) | (bit if item in later else 0)
                    after[state] = min(cost, after.get(state, cost))
                if not keep:
                    break
                keep = (keep - 1) & others
        best = after
    return min(best.values())


def _large(rnd: random.Random, items: int, uses: int) -> tuple[list[Interval], list[int]]:
    """Forward and backward over many leaves of random sizes, at half of the bytes of all."""
    sizes = [rnd.randrange(1, 101) * 1000 for _ in range(items)]
    order = list(range(items))
    sequence: list[int | None] = []
    for use in range(uses):
        for item in order if use % 2 == 0 else reversed(order):
            sequence += [item] if rnd.random() < 0.75 else [item, None]
    budget, last = sum(sizes) // 2, {}
    intervals, capacity = [], []
    for at, item in enumerate(sequence):
        if item is not None and item in last:
            intervals.append(Interval(last[item], at, sizes[item], sizes[item]))
        capacity.append(budget if item is None else budget - sizes[item])
        last[item] = at
    return intervals, capacity


def main() -> None:
    """Prints one line per kind of sizes and length of trace, and one for a large program."""
    for accesses, traces in ((10, 1500), (24, 150)):
        for mode in MODES:
            rnd = random.Random(0)
            ratios = []
            for _ in range(traces):
                trace = draw_trace(rnd, mode, accesses=accesses)
                ratios.append(gathered_bytes(trace) / least_gathered_bytes(trace))
            print(
                f"{traces} traces of {accesses} accesses, {mode} sizes: gathered / optimum "
                f"mean {statistics.mean(ratios):.4f} worst {max(ratios):.4f}"
            )
    intervals, capacity = _large(random.Random(0), 600, 4)
    begin = time.perf_counter()
    kept = pack(intervals, capacity)
    seconds = time.perf_counter() - begin
    gain = sum(intervals[i].gain for i in kept) / sum(it.gain for it in intervals)
    print(
        f"600 items x 4 uses, {len(capacity)} positions: {seconds:.2f} s, {gain:.3f} of all gain "
        "at half of the bytes"
    )


if __name__ == "__main__":
    main()
