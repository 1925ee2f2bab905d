"""Prefetch: issue each gather as late as still hides it.

`order` found the earliest place of each gather; here a cost model moves it back towards its use,
never past another collective. A copy that arrives early only occupies memory. The rates are an
explicit input (`Hardware`): they move issue slots, never the order of collectives or a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from zfunc.program.ir import Collective, Gather, Op, Program, Reduce, Status, Wait

__all__ = ["prefetch"]


def prefetch(program: Program, seconds_of: Callable[[Op], float]) -> Program:
    """Delays gathers until the compute before their use just covers them.

    Args:
        program: a program after `order`.
        seconds_of: the modelled time of one op (of a collective: on the network).

    Returns:
        The same ops; the subsequence of collectives is unchanged.
    """
    ops = program.ops
    wait_at = {op.token: at for at, op in enumerate(ops) if isinstance(op, Wait)}
    moved: dict[int, list[Op]] = {}
    gone: set[int] = set()
    free_network_by = float("inf")
    now = _compute_clock(ops, seconds_of)
    for at in range(len(ops) - 1, -1, -1):
        op = ops[at]
        if not isinstance(op, Gather):
            continue
        finish = min(now[wait_at[op.token]], free_network_by)
        start = finish - seconds_of(op)
        free_network_by = start
        target = at + 1
        while not _is_barrier(ops[target], op.token) and now[target + 1] <= start:
            target += 1
        if target > at + 1:
            gone.add(at)
            moved.setdefault(target, []).insert(0, op)
    result: list[Op] = []
    for at, op in enumerate(ops):
        result += moved.get(at, ())
        if at not in gone:
            result.append(op)
    return dataclasses.replace(program, ops=tuple(result))


def _compute_clock(ops: tuple[Op, ...], seconds_of: Callable[[Op], float]) -> list[float]:
    """The time at which each op begins if no compute op ever waits; one entry more at the end."""
    clock = [0.0]
    for op in ops:
        on_network = isinstance(op, Gather | Reduce | Wait | Status)
        clock.append(clock[-1] + (0.0 if on_network else seconds_of(op)))
    return clock


def _is_barrier(op: Op, token: int) -> bool:
    """What a gather may not be moved past: other collectives and its own wait."""
    own_wait = isinstance(op, Wait) and op.token == token
    return own_wait or isinstance(op, Gather | Reduce | Collective | Status)
