"""remat: what the backward pass needs from inside a region is computed again, and late.

A backward op that reads a value made in a region reads a copy instead; the ops that make the copy
are emitted right before its first reader, in their original order and only as far as needed. Region
inputs and outputs stay alive. Nested regions are done level by level: the copies that level k made
are the forward code of level k + 1, and those among them that only the backward pass read die. So
an outer region, once recomputed, again keeps only the inputs of its inner regions.

All values of one storage (views, versions written in place) form a group, which is copied or kept
as one. A group is kept if something outside its region reads or writes it, or if one of its ops
reads a storage that is overwritten later: computed again, that op would see other contents. The ops
up to the last write are copied together, so whatever reads the copy reads its final version; an op
that read an earlier version is one that is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from zfunc.errors import CaptureError, explain
from zfunc.hardware import Hardware
from zfunc.passes.keep import Prices, keep_by_policy
from zfunc.passes.regions import BACKWARD, Group, Step
from zfunc.program.ir import (
    Collective,
    Compute,
    Op,
    Program,
    Rng,
    Value,
    draws,
    map_refs,
    mutates,
    reads,
    writes,
)

__all__ = ["check_random", "rematerialise"]


def rematerialise(
    program: Program,
    hw: Hardware = Hardware(),  # noqa: B008
    axes: Mapping[str, int] | None = None,
) -> Program:
    """Recomputes in the backward pass what `remat` regions make in the forward pass.

    Args:
        program: as captured: compute ops and collectives of one micro-batch.
        hw: the rates by which `policies.budget` tells what is cheap to compute again.
        axes: the size of each axis of the mesh, which tells what is cheap to gather again; None
            where nothing is gathered.

    Returns:
        A program with the same results, bit for bit. An op is computed again at most once per level
        of nesting. A random op is recorded in the forward pass and replayed; a collective in a
        region is not repeated, its result is kept.

    Raises:
        CaptureError: the backward pass draws random numbers, see `check_random`.
        BudgetError: a region must keep more than its `policies.budget`.
    """
    check_random(program)
    computes = [op for op in program.ops if isinstance(op, Compute)]
    depth = max((len(op.regions) for op in computes if op.phase == "forward"), default=0)
    if not depth or all(op.phase == "forward" for op in computes):
        return program
    values, steps, outputs = list(program.values), _steps(program), _outputs(program)
    for level in range(depth):
        current = _Level(level, steps, values, outputs)
        now = dataclasses.replace(program, values=tuple(values))
        keep_by_policy(level, steps, current.groups, Prices(now, hw, axes or {}))
        steps = current.rewrite()
    ops = _with_rng(_live(steps, values, outputs))
    return dataclasses.replace(program, values=tuple(values), ops=tuple(ops))


def check_random(program: Program) -> None:
    """Refuses a program whose backward pass draws random numbers.

    Args:
        program: as captured.

    Raises:
        CaptureError: an op of the backward pass draws: `torch.utils.checkpoint` in the loss repeats
            a random op in the graph without repeating its numbers.
    """
    for op in program.ops:
        if isinstance(op, Compute) and op.phase == "backward" and draws(op):
            raise CaptureError(
                explain(
                    f"the backward pass of {program.name} draws random numbers ({op.target})",
                    expected="recomputation that repeats the numbers of the forward pass",
                    got="torch.utils.checkpoint, or an autograd.Function with a random backward",
                    do="wrap the block with zfunc.remat instead of torch.utils.checkpoint",
                ),
                runs_dynamic=True,
            )


def _steps(program: Program) -> list[Step]:
    """The ops of a captured program; a collective belongs to the phase that it stands in."""
    steps: list[Step] = []
    backward = False
    for place, op in enumerate(program.ops):
        if isinstance(op, Compute):
            late = op.phase == "backward"
            backward = backward or late
        else:
            late = backward
        level = BACKWARD if late else 0
        steps.append(Step(op, level, place, reads(op), writes(op), mutates(op)))
    return steps


def _outputs(program: Program) -> frozenset[int]:
    """The values that the program returns."""
    return frozenset(
        value
        for micro in program.micros
        for value in (micro.loss, micro.weight, *micro.grads, *micro.aux)
        if value is not None
    )


class _Level:
    """One level of nesting: copies for backward readers what the regions of that level make."""

    def __init__(
        self, level: int, steps: Sequence[Step], values: list[Value], outputs: Iterable[int]
    ):
        self.level = level
        self.steps = steps
        self.values = values
        self.groups: dict[int, Group] = {}
        self.maker: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.copied: set[int] = set()
        self._collect()
        for place, step in enumerate(steps):
            self._keep(place, step)
        for value in outputs:
            self._group(value).kept = self._group(value).is_result = True

    def rewrite(self) -> list[Step]:
        """The steps, with copies where backward code needs them."""
        out: list[Step] = []
        for step in self.steps:
            if step.level == BACKWARD:
                out.extend([self._copy(self.steps[place]) for place in self._needed(step.reads)])
                step = self._renamed(step)
                for value in step.writes:
                    self._move(value)
            out.append(step)
        return out

    def _move(self, value: int) -> None:
        """Tells a backward view of a recomputed value whose storage it uses now."""
        old = self.values[value]
        if old.owner != value:
            self.values[value] = dataclasses.replace(old, owner=self._rename(old.owner))

    def _group(self, value: int) -> Group:
        owner = self.values[value].owner
        if owner not in self.groups:
            self.groups[owner] = Group()
        return self.groups[owner]

    def _recomputed(self, value: int) -> bool:
        """Whether backward code reads a copy of the value; its own views need none."""
        group = self._group(value)
        if group.region is None or group.kept:
            return False
        return self.steps[self.maker[value]].level == self.level

    def _collect(self) -> None:
        """Finds the ops of every group."""
        for place, step in enumerate(self.steps):
            for value in step.writes:
                self.maker[value] = place
                group = self._group(value)
                group.chain.append(place)
                if self.values[value].owner == value:
                    group.home = step.home(self.level)
                    group.region = step.region(self.level)
            for value in step.mutates:
                group = self._group(value)
                group.chain.append(place)
                group.last_write = place

    def _keep(self, place: int, step: Step) -> None:
        """Marks the groups that must be kept because of one op."""
        made = {self.values[v].owner: self._group(v) for v in step.writes + step.mutates}
        here = step.region(self.level)
        for value in step.reads:
            group = self._group(value)
            if step.level != BACKWARD and group.region != here:
                group.kept = True
            if step.level != BACKWARD and group.home != step.home(self.level):
                group.is_result = True
            if group.last_write > place and set(made) != {self.values[value].owner}:
                _keep_all(made.values())
        if any(len(made) > 1 or self._group(value).region != here for value in step.mutates):
            _keep_all(made.values())

    def _needed(self, wanted: Iterable[int]) -> list[int]:
        """Places of the ops, not copied yet, that copies of the wanted values take."""
        found: set[int] = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if not self._recomputed(value):
                continue
            group = self._group(value)
            places = [self.maker[value]]
            if group.last_write >= 0 and group.last_write not in self.copied:
                places += [place for place in group.chain if place <= group.last_write]
            for place in places:
                if place not in self.copied:
                    self.copied.add(place)
                    found.add(place)
                    stack.extend(self.steps[place].reads)
        return sorted(found)

    def _copy(self, step: Step) -> Step:
        """The same op again, on copies."""
        assert isinstance(step.op, Compute)
        for value in step.writes:
            old, new = self.values[value], len(self.values)
            owner = new if old.owner == value else self._rename(old.owner)
            self.copies[value] = new
            self.values.append(dataclasses.replace(old, name=old.name + "'", owner=owner))
        outs = tuple(None if out is None else self.copies[out] for out in step.op.outs)
        op = dataclasses.replace(step.op, outs=outs, phase="recompute")
        made = tuple(self.copies[value] for value in step.writes)
        return self._renamed(dataclasses.replace(step, op=op, level=self.level + 1, writes=made))

    def _rename(self, value: int) -> int:
        return self.copies[value] if self._recomputed(value) else value

    def _renamed(self, step: Step) -> Step:
        """The same op reading copies."""
        if not any(self._recomputed(value) for value in step.reads):
            return step
        return dataclasses.replace(
            step,
            op=_reading(step.op, self._rename),
            reads=tuple(map(self._rename, step.reads)),
            mutates=tuple(map(self._rename, step.mutates)),
        )


def _keep_all(groups: Iterable[Group]) -> None:
    for group in groups:
        group.kept = True


def _reading(op: Op, rename: Callable[[int], int]) -> Op:
    """An op of a captured program with what it reads renamed."""
    if isinstance(op, Collective):
        return dataclasses.replace(op, source=rename(op.source))
    assert isinstance(op, Compute)
    args, kwargs = map_refs(op.args, rename), map_refs(op.kwargs, rename)
    return dataclasses.replace(op, args=args, kwargs=kwargs)


def _live(steps: Sequence[Step], values: Sequence[Value], outputs: Iterable[int]) -> list[Step]:
    """Drops ops whose results nobody reads any more.

    Collectives stay, because other ranks take part; random ops of the forward pass stay, because
    the numbers of later ones depend on them.
    """
    needed = set(outputs)
    owners = {values[value].owner for value in needed}
    kept: list[Step] = []
    for step in reversed(steps):
        lasting = isinstance(step.op, Collective) or (step.level == 0 and draws(step.op))
        written = any(values[value].owner in owners for value in step.mutates)
        if lasting or written or not needed.isdisjoint(step.writes):
            kept.append(step)
            needed.update(step.reads)
            owners.update(values[value].owner for value in step.reads)
    return kept[::-1]


def _with_rng(steps: Sequence[Step]) -> list[Op]:
    """The ops, with those that keep the generator's state and set it around random ops."""
    replayed = sorted({step.origin for step in steps if step.level > 0 and draws(step.op)})
    slots = {origin: slot for slot, origin in enumerate(replayed)}
    ops: list[Op] = []
    for step in steps:
        slot = slots.get(step.origin) if step.level >= 0 else None
        if slot is None:
            ops.append(step.op)
        elif step.level == 0:
            ops += [Rng("record", slot), step.op]
        else:
            ops += [Rng("replay", slot), step.op, Rng("restore", slot)]
    return ops
