"""Live bytes, op by op: the one definition that the passes plan with.

Live bytes are gathered copies, values derived from leaves alone, full gradients that await their
reduce, and the buffers that collectives in flight receive into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zfunc.program import memory
from zfunc.program.ir import Free, Gather, Leaf, Op, Program, Reduce, Value, Wait, writes

__all__ = ["gather_bytes", "grad_bytes", "live_bytes", "staging_bytes"]


def staging_bytes(leaf: Leaf, axis_sizes: Mapping[str, int]) -> int:
    """Bytes that the gather of a leaf needs besides the copy; see `memory.staging_bytes`."""
    axis = leaf.layouts.params.axis
    if axis is None:
        return 0
    return memory.staging_bytes(leaf.spec, axis_sizes[axis], cast=leaf.is_cast)


def gather_bytes(op: Gather, leaves: Sequence[Leaf], axis_sizes: Mapping[str, int]) -> int:
    """Bytes that a gather occupies from its issue to its wait: the copies and their staging."""
    return sum(leaves[i].spec.nbytes + staging_bytes(leaves[i], axis_sizes) for i in op.leaves)


def grad_bytes(program: Program) -> list[int]:
    """Bytes of full gradients and receive buffers during each op, the op's own results included."""
    return live_bytes(program.ops, program.values, program.leaves, {}, roles=("grad",))


def live_bytes(
    ops: Sequence[Op],
    values: Sequence[Value],
    leaves: Sequence[Leaf],
    axis_sizes: Mapping[str, int],
    roles: tuple[str, ...] = ("copy", "derived", "grad"),
) -> list[int]:
    """Live bytes during each op, what the op makes included.

    Args:
        ops: the ops.
        values: the values of the program.
        leaves: its leaves.
        axis_sizes: the sizes of the mesh's axes.
        roles: whose bytes count.

    Returns:
        One number per op.
    """
    during: list[int] = []
    alive: set[int] = set()
    in_flight: dict[int, int] = {}
    total = 0
    for op in ops:
        for value in writes(op):
            owner = values[value].owner
            if values[owner].role in roles and owner not in alive:
                alive.add(owner)
                total += values[owner].nbytes
        if isinstance(op, Reduce):
            in_flight[op.token] = op.receive_bytes
            total += op.receive_bytes
        elif isinstance(op, Gather):
            in_flight[op.token] = sum(staging_bytes(leaves[i], axis_sizes) for i in op.leaves)
            total += in_flight[op.token]
        during.append(total)
        if isinstance(op, Wait):
            total -= in_flight.pop(op.token, 0)
        elif isinstance(op, Free):
            for owner in {values[value].owner for value in op.values} & alive:
                alive.remove(owner)
                total -= values[owner].nbytes
    return during
