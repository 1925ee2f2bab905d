"""Keep: which storages of remat regions stay alive because a policy says so.

Under a byte budget the choice is that of `zfunc.passes.cut`. The storages that a region makes are
its items; ops that must run together (those that make, view or write one storage, or make several)
are a unit. A leaf is an item that cannot be kept: to have it again is to gather it, which costs
nothing where the backward pass reads it anyway. Nor can what depends on leaves alone be kept: the
passes after this one derive it wherever it is read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zfunc.errors import BudgetError, explain
from zfunc.hardware import Hardware
from zfunc.passes.cut import Item, Problem, Unit, choose, smallest
from zfunc.passes.derive import SMALL
from zfunc.passes.regions import BACKWARD, Group, Step
from zfunc.policy import Budget, Matmuls, Names
from zfunc.program.cost import op_flops, op_seconds
from zfunc.program.ir import Compute, Gather, Op, Program, Value, draws
from zfunc.program.text import op_text

__all__ = ["Prices", "keep_by_policy"]

_PER_SECOND = 1e12


@dataclasses.dataclass(frozen=True)
class Prices:
    """What ops and gathers of a program cost.

    Attributes:
        program: the program, with the values of all copies made so far.
        hw: the rates.
        axes: the size of each axis of the mesh.
    """

    program: Program
    hw: Hardware
    axes: Mapping[str, int]

    def op(self, op: Op) -> int:
        """Picoseconds that an op takes; whole, so that sums are the same in any order."""
        return round(_PER_SECOND * op_seconds(op, self.program, self.hw, self.axes))

    @functools.cached_property
    def leaves(self) -> Mapping[int, int]:
        """The whole leaf -> picoseconds that its gather takes."""
        found: dict[int, int] = {}
        for index, leaf in enumerate(self.program.leaves):
            axis = leaf.layouts.params.axis
            gathers = axis is not None and axis in self.axes and not leaf.resident
            gather = Gather(axis or "", (index,), (leaf.full,), 0)
            found[leaf.full] = self.op(gather) if gathers else 0
        return found


def keep_by_policy(
    level: int, steps: Sequence[Step], groups: Mapping[int, Group], prices: Prices
) -> None:
    """Marks the groups that the policies of one level's regions keep.

    Args:
        level: the level.
        steps: all ops.
        groups: owner -> group; those that must be kept are marked already.
        prices: of the program.

    Raises:
        BudgetError: a region must keep more than its budget.
    """
    program = prices.program
    view = _View(level, steps, groups, prices)
    homes: dict[str, list[int]] = {}
    for owner, group in groups.items():
        if group.home is not None:
            homes.setdefault(group.home, []).append(owner)
    for region, owners in homes.items():
        policy = program.policies.get(region)
        if isinstance(policy, Budget):
            owners = _Region(view, owners).choose(region, policy)
        elif isinstance(policy, Names):
            owners = [o for o in owners if not view.labels[o].isdisjoint(policy.names)]
        elif isinstance(policy, Matmuls):
            owners = [o for o in owners if any(op_flops(op, program) for op in view.makers(o))]
        else:
            continue
        for owner in owners:
            groups[owner].kept = True


@dataclasses.dataclass
class _View:
    """One level, and what regions with a policy ask of it."""

    level: int
    steps: Sequence[Step]
    groups: Mapping[int, Group]
    prices: Prices

    @property
    def values(self) -> Sequence[Value]:
        return self.prices.program.values

    @functools.cached_property
    def labels(self) -> Mapping[int, set[str]]:
        """Owner -> the names that it, its views and its versions have."""
        labels: dict[int, set[str]] = {}
        for value in self.values:
            labels.setdefault(value.owner, set()).update(value.labels)
        return labels

    @functools.cached_property
    def late(self) -> list[set[int]]:
        """The owners that each op of the backward pass reads."""
        return [self.owners(step.reads) for step in self.steps if step.level == BACKWARD]

    @functools.cached_property
    def sources(self) -> Mapping[int, frozenset[int]]:
        """What depends on leaves alone, and on which.

        What is much smaller than what it is made of is as good as any other value.
        """
        leaves = [leaf.full for leaf in self.prices.program.leaves]
        sources = {leaf: frozenset({leaf}) for leaf in leaves}
        free = set(self.prices.program.constants)
        for step in self.steps:
            made, read = self.owners(step.writes), self.owners(step.reads)
            written = any(self.groups[owner].last_write >= 0 for owner in made)
            if not isinstance(step.op, Compute) or draws(step.op) or written:
                continue
            if read <= free:
                free |= made
            elif read <= free | sources.keys() and not self._is_small(made - read, read):
                found = (leaf for owner in read for leaf in sources.get(owner, ()))
                sources |= dict.fromkeys(made - read, frozenset(found))
        return sources

    def _is_small(self, made: set[int], read: set[int]) -> bool:
        largest = max(self.values[owner].nbytes for owner in read)
        return 0 < sum(self.values[owner].nbytes for owner in made) * SMALL <= largest

    def owners(self, values: Iterable[int]) -> set[int]:
        return {self.values[value].owner for value in values}

    def places(self, owner: int) -> list[int]:
        """The places of the ops of this level that make, view or write a storage."""
        chain = self.groups[owner].chain
        return [place for place in chain if self.steps[place].level == self.level]

    def makers(self, owner: int) -> Iterator[Compute]:
        """Those ops."""
        for place in self.places(owner):
            op = self.steps[place].op
            if isinstance(op, Compute):
                yield op


class _Region:
    """What a region under a budget makes, as items and units."""

    def __init__(self, view: _View, owners: Sequence[int]):
        self.view = view
        self.owners = [owner for owner in owners if not view.groups[owner].is_result]
        self.items = {owner: index for index, owner in enumerate(self.owners)}

    def choose(self, region: str, policy: Budget) -> list[int]:
        """The owners of what is kept."""
        problem = self._problem()
        if not problem.targets:
            return []
        choice = choose(problem, policy.nbytes)
        if choice is None:
            raise self._infeasible(problem, region, policy)
        return [self.owners[item] for item in choice.kept]

    def _infeasible(self, problem: Problem, region: str, policy: Budget) -> BudgetError:
        least, program = smallest(problem), self.view.prices.program
        largest = max(least.kept, key=lambda item: (problem.items[item].nbytes or 0, -item))
        text = op_text(self.view.steps[self._chain(largest)[0]].op, program)
        return BudgetError(
            explain(
                f"policies.budget({policy.nbytes}) of {program.name}, remat {region}",
                expected=f"{least.nbytes} bytes or more",
                got=f"what cannot be computed again, such as the result of {text}",
                do="raise the budget, or leave collectives and overwritten values out of the remat",
            ),
            needed_bytes=least.nbytes,
            limit_bytes=policy.nbytes,
            op=text,
        )

    def _chain(self, item: int) -> list[int]:
        return self.view.groups[self.owners[item]].chain

    def _problem(self) -> Problem:
        view, sources = self.view, self.view.sources
        units, unit_of = self._units()
        read = [self._read(places) for places in units]
        leaves = sorted({leaf for owners in read for o in owners for leaf in self._leaves(o)})
        at = {leaf: len(self.owners) + number for number, leaf in enumerate(leaves)}
        near = self._read_late()
        items: list[Item] = []
        for owner in self.owners:
            kept, nbytes = view.groups[owner].kept, view.values[owner].nbytes
            derived = owner in sources and not kept
            items.append(Item(None if derived else nbytes, None if kept else unit_of[owner]))
        items += [Item(None, len(units) + number) for number in range(len(leaves))]
        found = [
            Unit(
                sum(view.prices.op(view.steps[place].op) for place in places),
                tuple(sorted({n for owner in owners for n in self._numbers(owner, at)})),
            )
            for places, owners in zip(units, read, strict=True)
        ]
        found += [Unit(0 if leaf in near else view.prices.leaves[leaf], ()) for leaf in leaves]
        return Problem(tuple(items), tuple(found), self._targets())

    def _read(self, places: Sequence[int]) -> set[int]:
        """The owners that a unit reads and does not make."""
        steps = [self.view.steps[place] for place in places]
        made = self.view.owners(value for step in steps for value in step.writes)
        return self.view.owners(value for step in steps for value in step.reads) - made

    def _leaves(self, owner: int) -> Iterable[int]:
        """The leaves that are gathered so that a value from elsewhere is there."""
        return () if owner in self.items else self.view.sources.get(owner, ())

    def _numbers(self, owner: int, at: Mapping[int, int]) -> list[int]:
        """The items that must be there so that a value is."""
        if owner in self.items:
            return [self.items[owner]]
        return [at[leaf] for leaf in self._leaves(owner)]

    def _units(self) -> tuple[list[list[int]], dict[int, int]]:
        """The places of each unit's ops, and the unit of each owner that can be made again."""
        unit_at: dict[int, int] = {}
        units: list[list[int]] = []
        repeated = [owner for owner in self.owners if not self.view.groups[owner].kept]
        for owner in repeated:
            places = set(self.view.places(owner))
            for unit in {unit_at[place] for place in places if place in unit_at}:
                places.update(units[unit])
                units[unit] = []
            unit_at.update(dict.fromkeys(places, len(units)))
            units.append(sorted(places))
        return units, {owner: unit_at[self.view.groups[owner].chain[0]] for owner in repeated}

    def _targets(self) -> tuple[int, ...]:
        """The items that the backward pass reads."""
        read = set().union(*self.view.late)
        return tuple(self.items[owner] for owner in self.owners if owner in read)

    def _read_late(self) -> set[int]:
        """The leaves that the backward pass reads while it is at this region.

        That is from its first read of what the region makes to the first of what another one does.
        """
        late = self.view.late
        uses = [place for place, read in enumerate(late) if not read.isdisjoint(self.items)]
        if not uses:
            return set()
        end = uses[-1] + 1
        while end < len(late) and not any(map(self._is_elsewhere, late[end])):
            end += 1
        read = set().union(*late[uses[0] : end])
        return {leaf for owner in read for leaf in self.view.sources.get(owner, ())}

    def _is_elsewhere(self, owner: int) -> bool:
        group = self.view.groups.get(owner)
        return group is not None and group.home is not None and not group.is_result
