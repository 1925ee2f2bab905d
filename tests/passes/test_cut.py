"""Cut against brute force: every subset of what may be kept, on random graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from zfunc.passes.cut import Item, Problem, Unit, choose, smallest


def outcome(problem: Problem, kept: Iterable[int]) -> tuple[int, int] | None:
    """Bytes and cost of keeping some items; None if a target cannot be had."""
    kept = set(kept)
    ran: set[int] = set()
    used: set[int] = set()

    def get(item: int) -> bool:
        if item in kept:
            used.add(item)
            return True
        maker = problem.items[item].maker
        if maker is None:
            return False
        if maker in ran:
            return True
        ran.add(maker)
        return all([get(read) for read in problem.units[maker].reads])

    if not all([get(target) for target in problem.targets]):
        return None
    nbytes = sum(problem.items[item].nbytes or 0 for item in used)
    return nbytes, sum(problem.units[unit].cost for unit in ran)


def least_costs(problem: Problem) -> dict[int, int]:
    """Bytes -> the least cost of a choice that keeps just so many."""
    keepable = [index for index, item in enumerate(problem.items) if item.nbytes is not None]
    best: dict[int, int] = {}
    for number in range(len(keepable) + 1):
        for kept in itertools.combinations(keepable, number):
            found = outcome(problem, kept)
            if found is not None:
                best[found[0]] = min(best.get(found[0], found[1]), found[1])
    return best


@st.composite
def problems(draw: Any, most: int = 8) -> Problem:
    """Graphs of up to `most` items; some cannot be kept, some cannot be made again."""
    items: list[Item] = []
    units: list[Unit] = []
    for _ in range(draw(st.integers(1, most))):
        before = range(len(items))
        reads = draw(st.sets(st.sampled_from(before), max_size=3)) if items else set()
        kind = draw(st.sampled_from(["plain", "plain", "plain", "twin", "fixed", "derived"]))
        nbytes = draw(st.integers(0, 12))
        if kind == "fixed":
            items.append(Item(nbytes, None))
            continue
        units.append(Unit(draw(st.integers(0, 12)), tuple(sorted(reads))))
        items.append(Item(None if kind == "derived" else nbytes, len(units) - 1))
        if kind == "twin":
            items.append(Item(draw(st.integers(0, 12)), len(units) - 1))
    targets = draw(st.sets(st.sampled_from(range(len(items))), min_size=1))
    return Problem(tuple(items), tuple(units), tuple(sorted(targets)))


def chain(num: int, nbytes: int, cost: int) -> Problem:
    """Each item is made of the one before it; all are needed."""
    items = tuple(Item(nbytes, index) for index in range(num))
    units = tuple(Unit(cost, (index - 1,) if index else ()) for index in range(num))
    return Problem(items, units, tuple(range(num)))


@example(chain(8, 4, 3))
@given(problems())
def test_the_choice_under_every_budget_is_the_best_of_all_subsets(problem: Problem) -> None:
    best = least_costs(problem)
    for budget in range(max(best) + 2):
        choice = choose(problem, budget)
        affordable = [cost for nbytes, cost in best.items() if nbytes <= budget]
        if not affordable:
            assert choice is None
            continue
        assert choice is not None and choice.nbytes <= budget
        assert outcome(problem, choice.kept) == (choice.nbytes, choice.cost)
        assert choice.cost == min(affordable)


@given(problems())
def test_the_smallest_choice_keeps_fewest_bytes_and_of_those_costs_least(problem: Problem) -> None:
    best, choice = least_costs(problem), smallest(problem)
    assert choice.nbytes == min(best)
    assert choice.cost == best[choice.nbytes]


def test_equal_layers_are_kept_one_by_one_and_the_last_ones_first() -> None:
    # Nothing is read by the next one: each costs and weighs the same.
    problem = Problem(
        tuple(Item(10, index) for index in range(200)),
        tuple(Unit(7, ()) for _ in range(200)),
        tuple(range(200)),
    )
    for budget in (0, 9, 10, 995, 1000, 2000):
        choice = choose(problem, budget)
        assert choice is not None
        assert choice.kept == set(range(200 - budget // 10, 200))
        assert choice.cost == 7 * (200 - budget // 10)


def test_costs_of_any_size_are_exact() -> None:
    huge = 10**18
    items = (Item(1, 0), Item(1, 1))
    for first, second in ((huge, huge + 1), (huge + 1, huge)):
        choice = choose(Problem(items, (Unit(first, ()), Unit(second, ())), (0, 1)), 1)
        assert choice is not None and choice.cost == huge
