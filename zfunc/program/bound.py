"""Bound: the fewest bytes that any program with the same accesses and budget must gather.

Between two reads of a leaf its copy is kept, or gathered again. At an op, the copies that are kept
across it share what the budget leaves beside the copies that the op reads and the gradients that
exist there; what does not fit is gathered again. Ops that no one copy is kept across lose the bytes
of different copies, so their losses add: the bound is the best such set of ops, found by dynamic
programming (a feasible dual of the packing that `pack` solves). Staging and derived values are left
out, which makes it optimistic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zfunc.program.ir import Accumulate, Gather, Program, Reduce, reads, writes

__all__ = ["least_gathered_bytes"]


def least_gathered_bytes(program: Program) -> int:
    """Bounds the gathered bytes of a program from below.

    Args:
        program: a program after `pack` or a later pass.

    Returns:
        Bytes; each gathered leaf at least once. Without a budget it is exactly that.
    """
    leaf_of = {
        out: i
        for op in program.ops
        if isinstance(op, Gather)
        for i, out in zip(op.leaves, op.outs, strict=True)
    }
    sizes = {leaf: program.values[out].nbytes for out, leaf in leaf_of.items()}
    once = sum(sizes.values())
    if program.limit_bytes is None:
        return once
    accesses, rooms = _accesses(program, leaf_of, sizes, program.limit_bytes)
    return once + _lost_bytes(accesses, rooms, sizes)


def _accesses(
    program: Program, leaf_of: Mapping[int, int], sizes: Mapping[int, int], limit: int
) -> tuple[list[set[int]], list[int]]:
    """The leaves that each op reads, and what the budget leaves beside them and the gradients.

    Gradients exist from their making to their reduce, or until they are added to others.
    """
    values = program.values
    grads: dict[int, int] = {}
    accesses: list[set[int]] = []
    rooms: list[int] = []
    for op in program.ops:
        owners = [values[value].owner for value in (*writes(op), *reads(op))]
        grads |= {o: values[o].nbytes for o in owners if values[o].role == "grad"}
        found = {leaf_of[o] for o in owners if o in leaf_of and not isinstance(op, Gather)}
        derives = getattr(op, "phase", "") == "derive"
        if (found and not derives) or isinstance(op, Reduce):
            received = op.receive_bytes if isinstance(op, Reduce) else 0
            accesses.append(found)
            rooms.append(limit - received - sum(grads.values()) - sum(sizes[i] for i in found))
        if isinstance(op, Reduce | Accumulate):
            for value in op.ins:
                grads.pop(values[value].owner, None)
    return accesses, rooms


def _lost_bytes(
    accesses: Sequence[set[int]], rooms: Sequence[int], sizes: Mapping[int, int]
) -> int:
    """Bytes of the spans between two reads that cannot all be kept."""
    spans: list[tuple[int, int, int]] = []
    last: dict[int, int] = {}
    for at, found in enumerate(accesses):
        spans += [(last[leaf], at, sizes[leaf]) for leaf in found if leaf in last]
        last |= dict.fromkeys(found, at)
    demand = [0] * (len(accesses) + 1)
    earliest = list(range(len(accesses)))
    for start, stop, nbytes in sorted(spans, reverse=True):
        demand[start + 1] += nbytes
        demand[stop] -= nbytes
        earliest[start + 1 : stop] = [start] * (stop - start - 1)
    best = [0] * (len(accesses) + 1)
    crossing = 0
    for at, room in enumerate(rooms):
        crossing += demand[at]
        best[at + 1] = max(best[at], best[earliest[at] + 1] + max(0, crossing - room))
    return best[-1]
