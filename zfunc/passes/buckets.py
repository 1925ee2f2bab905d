"""Buckets: which leaves travel together.

A large leaf travels alone, straight from and into its own buffer. Small leaves of one dtype and one
layout travel together in the order of their first use, so that the number of messages does not
depend on the number of leaves. The rule reads the program only: every rank finds the same buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zfunc.program.ir import Compute, Leaf, Op, reads

__all__ = ["BUCKET_BYTES", "LARGE_LEAF_BYTES", "buckets", "first_uses"]

LARGE_LEAF_BYTES = 1 << 18
BUCKET_BYTES = 1 << 20


def buckets(
    leaves: tuple[Leaf, ...],
    ops: Iterable[Op],
    derived: Mapping[int, Compute],
    bucket_bytes: int = BUCKET_BYTES,
    leaf_order: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """Groups the leaves that the ops read.

    Args:
        leaves: the leaf table.
        ops: the ops of the program.
        derived: virtual values and the ops that derive them from leaves.
        bucket_bytes: a bucket of small leaves is closed before it would exceed this.
        leaf_order: the leaves and the order that ranks agreed on, instead of those of the ops.

    Returns:
        Leaf indices per bucket, buckets in the order of first use.
    """
    order = first_uses(leaves, ops, derived) if leaf_order is None else leaf_order
    return _group(leaves, order, bucket_bytes)


def first_uses(
    leaves: tuple[Leaf, ...], ops: Iterable[Op], derived: Mapping[int, Compute]
) -> list[int]:
    """The leaves that the ops read, directly or through what is derived, in order of first use."""
    index = {leaf.full: i for i, leaf in enumerate(leaves)}
    order: dict[int, None] = {}
    seen: set[int] = set()

    for op in ops:
        waiting = [*reversed(reads(op))]
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in index:
                order[index[value]] = None
            elif value in derived:
                waiting.extend(reversed(reads(derived[value])))
    return list(order)


def _group(
    leaves: tuple[Leaf, ...], order: Iterable[int], bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Cuts an order of leaves into buckets."""
    groups: list[list[int]] = []
    open_groups: dict[object, tuple[list[int], int]] = {}
    for i in order:
        leaf = leaves[i]
        if leaf.spec.nbytes >= LARGE_LEAF_BYTES:
            groups.append([i])
            continue
        rows = (leaf.layouts.params, leaf.layouts.grads, leaf.layouts.opt)
        kind = (
            leaf.spec.dtype,
            leaf.reduced_dtype,
            leaf.trainable,
            tuple(row.axis for row in rows),
        )
        group, size = open_groups.get(kind, ([], 0))
        if not group or size + leaf.spec.nbytes > bucket_bytes:
            group, size = [], 0
            groups.append(group)
        group.append(i)
        open_groups[kind] = (group, size + leaf.spec.nbytes)
    return [tuple(group) for group in groups]
