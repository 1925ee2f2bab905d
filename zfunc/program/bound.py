"""Bound: the fewest bytes that any program with the same accesses and budget must gather.

Between two reads of a leaf its copy is kept, or gathered again. At an op, the copies that are kept
across it share what the budget leaves beside the copies that the op reads; what does not fit is
gathered again. Ops that no copy could be kept across together lose the bytes of different copies, so
their losses add: the bound is the best such set of ops, found by dynamic programming (a feasible
dual of the packing that `pack` solves). It knows copies only: gradients and derived values make it
optimistic.
"""

from __future__ import annotations

from collections.abc import Sequence

from zfunc.program.ir import Gather, Program, reads

__all__ = ["least_gathered_bytes"]


def least_gathered_bytes(program: Program) -> int:
    """Bounds the gathered bytes of a program from below.

    Args:
        program: a program after `pack` or a later pass.

    Returns:
        Bytes; each gathered leaf at least once.
    """
    leaf_of = {
        out: i
        for op in program.ops
        if isinstance(op, Gather)
        for i, out in zip(op.leaves, op.outs, strict=True)
    }
    sizes = {leaf: program.values[out].nbytes for out, leaf in leaf_of.items()}
    accesses = []
    for op in program.ops:
        owners = {program.values[value].owner for value in reads(op)}
        found = {leaf_of[owner] for owner in owners if owner in leaf_of}
        if found and getattr(op, "phase", "") != "derive":
            accesses.append(found)
    once = sum(sizes.values())
    limit = program.limit_bytes
    return once if limit is None else once + _lost_bytes(accesses, sizes, limit)


def _lost_bytes(accesses: Sequence[set[int]], sizes: dict[int, int], limit: int) -> int:
    """Bytes of the intervals between two reads that cannot all be kept."""
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
    for at, found in enumerate(accesses):
        crossing += demand[at]
        room = limit - sum(sizes[leaf] for leaf in found)
        best[at + 1] = max(best[at], best[earliest[at] + 1] + max(0, crossing - room))
    return best[-1]
