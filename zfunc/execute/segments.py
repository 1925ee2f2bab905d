"""Segments: runs of compute ops between two data movements, as generated Python code.

A segment is one function over the environment (the list that holds every living value). It loads
what it reads, calls the operators, drops each value after its last use, and stores what later ops
read. Compared with visiting nodes in Python this saves 10-14 us an op.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zfunc.program.ir import Compute, Free, Op, Program, Ref, reads, writes

__all__ = ["Segment", "compile_segments"]

Env = list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A compiled run of compute ops.

    Attributes:
        run: executes it on an environment.
        ops: the ops that it stands for.
    """

    run: Callable[[Env], None]
    ops: tuple[Compute, ...]


def compile_segments(program: Program, *, max_ops: int | None = None) -> list[Op | Segment]:
    """Replaces runs of compute ops by segments.

    Args:
        program: a program after `pack`.
        max_ops: the longest segment, for tests that look between ops.

    Returns:
        The schedule: segments, and all other ops as they are.
    """
    last = _last_uses(program)
    schedule: list[Op | Segment] = []
    run: list[Compute] = []
    start = 0

    def close() -> None:
        if run:
            schedule.append(_compile(run, start, last, program))
            run.clear()

    for at, op in enumerate(program.ops):
        if isinstance(op, Compute):
            if max_ops is not None and len(run) == max_ops:
                close()
            if not run:
                start = at
            run.append(op)
        else:
            close()
            schedule.append(op)
    close()
    return schedule


def _last_uses(program: Program) -> Mapping[int, int]:
    """The position of the last op that reads or frees each value; outputs last to the end."""
    last: dict[int, int] = {}
    for at, op in enumerate(program.ops):
        used = op.values if isinstance(op, Free) else (*writes(op), *reads(op))
        last |= dict.fromkeys(used, at)
    for micro in program.micros:
        kept = (micro.loss, micro.weight, *micro.aux)
        last |= {value: len(program.ops) for value in kept if value is not None}
    return last


def _compile(
    ops: Sequence[Compute], start: int, last: Mapping[int, int], program: Program
) -> Segment:
    """Writes and compiles the code of one segment."""
    names: dict[str, Any] = {}
    lines: list[str] = []
    local: set[int] = set()
    stop = start + len(ops)
    body: list[str] = []
    for at, op in enumerate(ops, start):
        for value in dict.fromkeys(reads(op)):
            if value not in local:
                local.add(value)
                lines.append(f"v{value} = env[{value}]")
                if last[value] < stop:
                    lines.append(f"env[{value}] = None")
        body.append(_call(op, at - start, names))
        local.update(writes(op))
        dead = [v for v in dict.fromkeys((*reads(op), *writes(op))) if last[v] <= at]
        if dead:
            body.append("del " + ", ".join(f"v{value}" for value in dead))
    for op in ops:
        body += [f"env[{value}] = v{value}" for value in writes(op) if last[value] >= stop]
    text = "def segment(env):\n" + "".join(f"    {line}\n" for line in (*lines, *body))
    exec(compile(text, f"<segment of {program.name}>", "exec"), names)
    return Segment(names["segment"], tuple(ops))


def _call(op: Compute, number: int, names: dict[str, Any]) -> str:
    """One line of code that calls an operator."""
    names[f"f{number}"] = op.target
    parts = [_text(arg, names) for arg in op.args]
    parts += [f"{key}={_text(value, names)}" for key, value in op.kwargs]
    call = f"f{number}({', '.join(parts)})"
    if not op.packed:
        return call if op.outs[0] is None else f"v{op.outs[0]} = {call}"
    targets = ", ".join("_" if out is None else f"v{out}" for out in op.outs)
    return f"{targets}, = {call}"


def _text(arg: Any, names: dict[str, Any]) -> str:
    """An argument as code; what has no literal form is bound to a name."""
    if isinstance(arg, Ref):
        return f"v{arg.id}"
    if isinstance(arg, list | tuple):
        items = ", ".join(_text(item, names) for item in arg)
        return f"[{items}]" if isinstance(arg, list) else f"({items},)" if arg else "()"
    if arg is None or isinstance(arg, bool | int | str):
        return repr(arg)
    if isinstance(arg, float) and math.isfinite(arg):
        return repr(arg)
    if isinstance(arg, torch.dtype | torch.layout | torch.memory_format):
        names["torch"] = torch
        return str(arg)
    names[f"c{len(names)}"] = arg
    return f"c{len(names) - 1}"
