"""Digest: what ranks compare before their first collective.

Two ranks may run different compute ops, but they must make the same collectives in the same order.
The digest hashes that sequence and nothing else: global shapes, never the local pieces, which
differ in size between ranks; not when a collective is issued or awaited, which is a rank's own
business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from zfunc.layout import ShapeDtype
from zfunc.policy import Budget
from zfunc.program.ir import (
    Collective,
    Compute,
    Gather,
    Op,
    Program,
    Reduce,
    Status,
    Update,
    reads,
    writes,
)

__all__ = ["collective_lines", "digest", "pattern", "spec_text"]


def digest(program: Program) -> bytes:
    """Hashes a program's sequence of collectives.

    Args:
        program: a program after `pack`.

    Returns:
        16 bytes, equal on ranks that can run their programs together.
    """
    lines = "\n".join(collective_lines(program))
    return hashlib.blake2b(lines.encode(), digest_size=16).digest()


def pattern(micros: Sequence[Program]) -> bytes:
    """Hashes what the passes read of captured micro-batches, so that equal ones plan alike.

    Shapes that depend on the batch are left out: variable lengths have one pattern. Those of
    gradients and of values that depend on leaves alone count, as they do against budgets; and all
    of them where a `policies.budget` chooses by them what to compute again.

    Args:
        micros: one captured program per micro-batch.

    Returns:
        16 bytes; under the same agreed buckets and budgets, programs of one pattern have the same
        sequence of collectives.
    """
    lines: list[object] = []
    for micro in micros:
        counted = {leaf.full for leaf in micro.leaves} | set(micro.constants)
        lines += [sorted(micro.policies.items()), [v.labels for v in micro.values]]
        if any(isinstance(policy, Budget) for policy in micro.policies.values()):
            lines += [spec_text(v.spec) for v in micro.values]
            counted.update(range(len(micro.values)))
        for op in micro.ops:
            if all(value in counted for value in reads(op)):
                counted.update(writes(op))
            if isinstance(op, Compute):
                what = (str(op.target), op.outs, op.packed, op.phase, op.regions)
            else:
                what = (type(op).__name__, writes(op), getattr(op, "axis", ""))
            lines.append((what, reads(op)))
        for grad in micro.micros[0].grads:
            counted.update(() if grad is None else (grad,))
        lines += [
            (v.owner, v.role, v.nbytes if i in counted else -1) for i, v in enumerate(micro.values)
        ]
        lines += [
            (leaf.path, spec_text(leaf.spec), leaf.layouts.params.spec) for leaf in micro.leaves
        ]
        lines.append(micro.micros[0])
    return hashlib.blake2b(repr(lines).encode(), digest_size=16).digest()


def collective_lines(program: Program) -> list[str]:
    """The sequence of collectives as text, one a line, for errors that show where ranks differ.

    Args:
        program: a program after `pack`.

    Returns:
        One line for each gather, reduce, collective of the loss, status and update.
    """
    return [line for op in program.ops if (line := _line(op, program))]


def spec_text(spec: ShapeDtype) -> str:
    """A shape and dtype in one word.

    Example:
        >>> import torch
        >>> spec_text(ShapeDtype((4, 128), torch.bfloat16))
        'bfloat16[4,128]'
    """
    return f"{str(spec.dtype).removeprefix('torch.')}[{','.join(map(str, spec.shape))}]"


def _line(op: Op, program: Program) -> str | None:
    if isinstance(op, Gather):
        return f"gather {op.axis} {_leaves(op.leaves, op.outs, program)}"
    if isinstance(op, Reduce):
        name = "reduce" if op.scatter else "reduce-whole"
        return f"{name} {op.axis} {_leaves(op.leaves, op.ins, program)}"
    if isinstance(op, Collective):
        whole = program.values[op.source].spec
        if op.name == "gather":
            whole = ShapeDtype(op.shape, whole.dtype)
        return f"collective-{op.name} {op.axis} {spec_text(whole)}"
    if isinstance(op, Status):
        return f"status losses {len(op.losses)} weights {len(op.weights)}"
    if isinstance(op, Update):
        return f"update {' '.join(program.leaves[i].path for i in op.leaves)}"
    return None


def _leaves(leaves: tuple[int, ...], moved: tuple[int, ...], program: Program) -> str:
    """Paths and global shapes of the leaves of a bucket, in the dtype in which they travel."""
    whole = [
        ShapeDtype(program.leaves[i].spec.shape, program.values[v].spec.dtype)
        for i, v in zip(leaves, moved, strict=True)
    ]
    return " ".join(
        f"{program.leaves[i].path}:{spec_text(spec)}" for i, spec in zip(leaves, whole, strict=True)
    )
