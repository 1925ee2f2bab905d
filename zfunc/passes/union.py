"""Union: programs of ranks that do not use the same leaves, made to communicate alike.

Every rank reduces the gradients of all, its own or zeros, in one agreed order: sums are those of
ranks that run one program. Between two reduces ranks merge their sequences of gathers to a shortest
common supersequence; each then takes part in what the others need: a gather whose copy it drops.
Every rank computes what it would have computed alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from zfunc.layout import ShapeDtype
from zfunc.program.ir import (
    Collective,
    Compute,
    Free,
    Gather,
    Leaf,
    Op,
    Program,
    Reduce,
    Status,
    Value,
    Wait,
    reads,
    writes,
)

__all__ = [
    "Unit",
    "grads_done",
    "merge",
    "merge_all",
    "merge_units",
    "units",
    "with_ghosts",
    "with_weight",
    "with_zero_grads",
]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Unit:
    """One collective as all ranks spell it: a gather, or all the reduces of a bucket in a row.

    Attributes:
        kind: "gather", "reduce" or "ask" (of the loss itself).
        leaves: whose; for "ask" empty.
        detail: what else must agree, as text.
    """

    kind: str
    leaves: tuple[int, ...]
    detail: str


def units(program: Program) -> list[Unit]:
    """The sequence of collectives of a program after `pack`, in units that stay together."""
    return [unit for unit in _each_unit(program.ops) if unit is not None]


def merge(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """A shortest common supersequence; where either may come first, the smaller does."""
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    stop = 0
    while stop < min(len(a), len(b)) - start and a[-1 - stop] == b[-1 - stop]:
        stop += 1
    head, tail = list(a[:start]), a[len(a) - stop :]
    a, b = a[start : len(a) - stop], b[start : len(b) - stop]
    common = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) - 1, -1, -1):
        row, below = common[i], common[i + 1]
        for j in range(len(b) - 1, -1, -1):
            row[j] = below[j + 1] + 1 if a[i] == b[j] else max(below[j], row[j + 1])
    i = j = 0
    while i < len(a) and j < len(b):
        down, right = common[i + 1][j], common[i][j + 1]
        if a[i] == b[j]:
            head.append(a[i])
            i, j = i + 1, j + 1
        elif down > right or (down == right and a[i] <= b[j]):
            head.append(a[i])
            i += 1
        else:
            head.append(b[j])
            j += 1
    return [*head, *a[i:], *b[j:], *tail]


def merge_all(sequences: Sequence[list[Any]]) -> list[Any]:
    """Merges some sequences into one that contains each, whatever their order."""
    different = [each for at, each in enumerate(sequences) if each not in sequences[:at]]
    return functools.reduce(merge, sorted(different), [])


def merge_units(sequences: Sequence[list[Unit]]) -> list[Unit]:
    """Merges what ranks do between one reduce and the next; the reduces they have in common."""
    stretches: list[list[list[Unit]]] = []
    reduces: list[list[Unit]] = []
    for sequence in sequences:
        stretches.append([[]])
        reduces.append([unit for unit in sequence if unit.kind == "reduce"])
        for unit in sequence:
            stretches[-1][-1].append(unit)
            if unit.kind == "reduce":
                stretches[-1].append([])
    assert all(each == reduces[0] for each in reduces)
    return [unit for each in zip(*stretches, strict=True) for unit in merge_all(each)]


def grads_done(program: Program) -> dict[int, int]:
    """The leaves that have a gradient in a captured micro-batch: leaf -> the op after which."""
    touched: dict[int, int] = {}
    for at, op in enumerate(program.ops):
        touched |= {program.values[value].owner: at for value in (*reads(op), *writes(op))}
    return {
        leaf: touched[program.values[grad].owner]
        for leaf, grad in enumerate(program.micros[0].grads)
        if grad is not None
    }


def with_zero_grads(program: Program, leaves: Sequence[int]) -> Program:
    """Gives a captured micro-batch an explicit zero gradient for each of some leaves.

    Args:
        program: one captured micro-batch.
        leaves: in the order in which ranks have their gradients; a zero is made in its turn.
    """
    (micro,) = program.micros
    values, grads, done = list(program.values), list(micro.grads), grads_done(program)
    after: dict[int, list[Op]] = {}
    at = min((done[i] for i in leaves if i in done), default=len(program.ops)) - 1
    for i in leaves:
        if i in done:
            at = max(at, done[i])
        else:
            leaf = program.leaves[i]
            grads[i] = _zeros(values, after.setdefault(at, []), leaf)
    ops = [*after.get(-1, ())]
    ops += [new for at, op in enumerate(program.ops) for new in (op, *after.get(at, ()))]
    return dataclasses.replace(
        program,
        values=tuple(values),
        ops=tuple(ops),
        micros=(dataclasses.replace(micro, grads=tuple(grads)),),
    )


def with_weight(program: Program) -> Program:
    """Gives a captured micro-batch whose loss has no weight the weight 1."""
    (micro,) = program.micros
    if micro.weight is not None:
        return program
    out = len(program.values)
    value = Value("weight", ShapeDtype((), torch.float64), out, 8, "activation")
    ones = torch.ops.aten.ones.default
    op = Compute(ones, ([],), (("dtype", torch.float64),), (out,), False, "forward")
    return dataclasses.replace(
        program,
        values=(*program.values, value),
        ops=(*program.ops, op),
        micros=(dataclasses.replace(micro, weight=out),),
    )


def with_ghosts(program: Program, merged: Sequence[Unit]) -> Program:
    """Inserts what a rank gathers only because others need it, and drops the copy at once.

    Args:
        program: a program after `pack`, its collectives awaited at once.
        merged: the sequence of all ranks, of which the program's own is a subsequence.

    Returns:
        A program whose sequence of collectives is `merged`.
    """
    values = list(program.values)
    ops: list[Op] = []
    token = 1 + max((op.token for op in program.ops if isinstance(op, Wait)), default=-1)
    remaining = list(merged)

    def add_ghost() -> None:
        nonlocal token
        ghost = remaining.pop(0)
        assert ghost.kind == "gather"
        outs: list[int] = []
        for i in ghost.leaves:
            leaf = program.leaves[i]
            outs.append(len(values))
            values.append(Value(leaf.path, leaf.spec, len(values), leaf.spec.nbytes, "copy"))
        copies = tuple(outs)
        ops.extend([Gather(ghost.detail, ghost.leaves, copies, token), Wait(token), Free(copies)])
        token += 1

    for op, unit in zip(program.ops, _each_unit(program.ops), strict=True):
        ends = isinstance(op, Status)
        while remaining and (ends or unit is not None) and (ends or remaining[0] != unit):
            add_ghost()
        if unit is not None:
            remaining.pop(0)
        ops.append(op)
    while remaining:  # a forward without collectives of its own has no status
        add_ghost()
    return dataclasses.replace(program, values=tuple(values), ops=tuple(ops))


def _chain(ops: Sequence[Op], at: int) -> list[Reduce]:
    """The reduces that sum one bucket over one axis after the other."""
    first = ops[at]
    assert isinstance(first, Reduce)
    chain = [first]
    for after in ops[at + 1 :]:
        if isinstance(after, Reduce) and after.ins == chain[-1].outs:
            chain.append(after)
        elif not isinstance(after, Wait | Free):
            break
    return chain


def _each_unit(ops: Sequence[Op]) -> list[Unit | None]:
    """The unit that begins at each op."""
    found: list[Unit | None] = []
    for at, op in enumerate(ops):
        unit: Unit | None = None
        if isinstance(op, Gather):
            unit = Unit("gather", op.leaves, op.axis)
        elif isinstance(op, Collective):
            unit = Unit("ask", (), f"{op.name} {op.axis} {op.shape}")
        elif isinstance(op, Reduce) and not _continues(ops, at):
            steps = " ".join(f"{step.axis}:{step.scatter}" for step in _chain(ops, at))
            unit = Unit("reduce", op.leaves, steps)
        found.append(unit)
    return found


def _continues(ops: Sequence[Op], at: int) -> bool:
    """Whether a reduce sums further what the reduce before it has summed over another axis."""
    op = ops[at]
    assert isinstance(op, Reduce)
    for before in reversed(ops[:at]):
        if isinstance(before, Reduce):
            return before.outs == op.ins
        if not isinstance(before, Wait | Free):
            return False
    return False


def _zeros(values: list[Value], ops: list[Op], leaf: Leaf) -> int:
    """Adds an op that makes a zero gradient."""
    spec = leaf.spec
    out, device = len(values), leaf.layouts.params.mesh.device
    values.append(Value(f"zero {leaf.path}", spec, out, spec.nbytes, "activation"))
    kwargs = (("dtype", spec.dtype), ("device", device))
    args = (list(spec.shape),)
    ops.append(Compute(torch.ops.aten.zeros.default, args, kwargs, (out,), False, "backward"))
    return out
