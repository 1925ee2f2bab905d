"""Order: which collectives are in flight together, decided by bytes alone.

`pack` and `accumulate` await every collective at once. Here each reduce may stay in flight until
the next one is issued, and each gather is issued earlier, past the compute ops before it, as long
as the budgets of live bytes and of bytes read ahead allow. Gathers keep their order and reduces
keep theirs, so the sequence of collectives is a function of the accesses and the budgets, never
of measured rates: all ranks find the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from zfunc.passes.live import gather_bytes, live_bytes
from zfunc.program.ir import Accumulate, Free, Gather, Op, Program, Reduce, Status, Wait

__all__ = ["order"]


def order(
    program: Program, axis_sizes: Mapping[str, int], *, ahead_bytes: int | None = None
) -> Program:
    """Gives collectives time: reduces are awaited later, gathers issued earlier.

    Args:
        program: a program after `pack`.
        axis_sizes: the sizes of the mesh's axes.
        ahead_bytes: bytes gathered before they are needed; None means twice the largest gather.

    Returns:
        The same ops in another order.
    """
    program = _await_reduces_late(program, axis_sizes)
    return _issue_gathers_early(program, axis_sizes, ahead_bytes)


def _await_reduces_late(program: Program, axis_sizes: Mapping[str, int]) -> Program:
    """Moves what follows a reduce (wait, free, accumulate) to just before the next reduce."""
    ops, limit = program.ops, program.limit_bytes
    assert limit is not None
    during = live_bytes(ops, program.values, program.leaves, axis_sizes)
    moved: dict[int, list[Op]] = {}
    gone: set[int] = set()
    at = 0
    while at < len(ops):
        op = ops[at]
        if not isinstance(op, Reduce):
            at += 1
            continue
        stop = _end_of(ops, at)
        held = op.receive_bytes + _grad_bytes(program, (*op.ins, *op.outs))
        target = stop
        while not isinstance(ops[target], Reduce | Status) and during[target] + held <= limit:
            target += 1
        for k in range(stop, target):
            during[k] += held
        gone.update(range(at + 1, stop))
        moved.setdefault(target, []).extend(ops[at + 1 : stop])
        at = stop
    result: list[Op] = []
    for at, op in enumerate(ops):
        result += moved.get(at, ())
        if at not in gone:
            result.append(op)
    return dataclasses.replace(program, ops=tuple(result))


def _end_of(ops: Sequence[Op], at: int) -> int:
    """Where what follows a reduce ends, the reduces of its results over other axes included."""
    results = None
    while isinstance(op := ops[at], Reduce | Wait | Free | Accumulate):
        if isinstance(op, Reduce):
            if results not in (None, op.ins):
                break
            results = op.outs
        at += 1
    return at


def _grad_bytes(program: Program, values: Iterable[int]) -> int:
    """Bytes of the full gradients among some values."""
    owners = {program.values[value].owner for value in values}
    return sum(program.values[o].nbytes for o in owners if program.values[o].role == "grad")


def _issue_gathers_early(
    program: Program, axis_sizes: Mapping[str, int], ahead_bytes: int | None
) -> Program:
    """Moves each gather before the ops that can hide it, within both budgets."""
    ops, limit = program.ops, program.limit_bytes
    assert limit is not None
    sizes = {
        at: gather_bytes(op, program.leaves, axis_sizes)
        for at, op in enumerate(ops)
        if isinstance(op, Gather)
    }
    if ahead_bytes is None:
        ahead_bytes = 2 * max(sizes.values(), default=0)
    during = live_bytes(ops, program.values, program.leaves, axis_sizes)
    ahead = [0] * len(ops)
    moved: dict[int, list[Op]] = {}
    earliest = 0
    for at, size in sizes.items():
        target = at
        while target > earliest:
            k = target - 1
            if during[k] + size > limit or ahead[k] + size > ahead_bytes:
                break
            target = k
        for k in range(target, at):
            during[k] += size
            ahead[k] += size
        moved.setdefault(target, []).append(ops[at])
        earliest = target
    result: list[Op] = []
    for at, op in enumerate(ops):
        result += moved.get(at, ())
        if at not in sizes:
            result.append(op)
    return dataclasses.replace(program, ops=tuple(result))
