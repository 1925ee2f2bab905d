"""Whole: gather every leaf first, compute, then reduce every gradient once.

The sequence of collectives depends on the leaf table alone, so ranks may compute whatever they like
in between: this is the program of the dynamic rung, and the one that ranks fall back to when their
own programs are too different to be merged. It needs all full parameters and gradients at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from zfunc.errors import BudgetError, explain
from zfunc.layout import ShapeDtype
from zfunc.meshes import Mesh
from zfunc.passes.accumulate import accumulate
from zfunc.passes.buckets import BUCKET_BYTES, buckets
from zfunc.passes.live import live_bytes as live_bytes_of
from zfunc.passes.union import with_weight, with_zero_grads
from zfunc.program.ir import (
    Call,
    Collective,
    Compute,
    Free,
    Gather,
    Leaf,
    Micro,
    Op,
    Program,
    Value,
    Wait,
    map_refs,
)

__all__ = ["call_program", "whole_program"]


def call_program(name: str, leaves: Sequence[Leaf], *, has_loss: bool) -> Program:
    """A micro-batch whose only op calls the user's function, in the form that capture returns.

    Args:
        name: the name of the function.
        leaves: its parameters; their `full` is set here.
        has_loss: whether it is a loss with a gradient.

    Returns:
        A program with one `Call`.
    """
    values: list[Value] = []

    def add(spec: ShapeDtype, what: str, role: str) -> int:
        values.append(Value(what, spec, len(values), spec.nbytes, role))
        return len(values) - 1

    table = tuple(
        dataclasses.replace(leaf, full=add(leaf.spec, leaf.path, "leaf")) for leaf in leaves
    )
    loss = weight = None
    grads: list[int | None] = [None] * len(table)
    if has_loss:
        scalar = ShapeDtype((), torch.float64)
        loss, weight = add(scalar, "loss", "activation"), add(scalar, "weight", "activation")
        for i, leaf in enumerate(table):
            if leaf.trainable:
                grads[i] = add(leaf.spec, f"full grad {leaf.path}", "grad")
    call = Call(
        tuple(leaf.full for leaf in table),
        loss,
        weight,
        tuple(grad for grad in grads if grad is not None),
    )
    micro = Micro((), None, loss, weight, tuple(grads), ())
    mode = "grad" if has_loss else "forward"
    return Program(name, mode, table, tuple(values), (call,), {}, {}, (micro,))


def whole_program(
    micros: Sequence[Program],
    mesh: Mesh,
    *,
    update: bool,
    live_bytes: int | None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Program:
    """Builds the program whose collectives depend on the leaf table alone.

    Args:
        micros: one program per micro-batch, captured or from `call_program`.
        mesh: the mesh.
        update: whether an optimizer update follows.
        live_bytes: the budget; None means a quarter of the device's memory.
        bucket_bytes: see `buckets`.

    Returns:
        A program in which every read value exists when it is read.

    Raises:
        BudgetError: full parameters and gradients do not fit.
    """
    trainable = [i for i, leaf in enumerate(micros[0].leaves) if leaf.trainable]
    if micros[0].mode != "forward":
        micros = [with_weight(with_zero_grads(micro, trainable)) for micro in micros]
    order = [i for i, leaf in enumerate(micros[0].leaves) if leaf.is_param]
    program = accumulate(
        micros, mesh, update=update, bucket_bytes=bucket_bytes, leaf_order=order, once=True
    )
    program = _gather_first(program, bucket_bytes)
    sizes = dict(mesh.axes)
    during = live_bytes_of(program.ops, program.values, program.leaves, sizes)
    limit = mesh.hw.device_bytes // 4 if live_bytes is None else live_bytes
    needed = max(during, default=0)
    if needed > limit:
        largest = max(program.leaves, key=lambda leaf: leaf.spec.nbytes).path
        raise BudgetError(
            explain(
                f"{program.name} must hold all parameters and gradients whole at once",
                expected=f"live_bytes of at least {needed}",
                got=f"{limit}",
                do="raise Prefetch(live_bytes=), or write the loss so that it can be traced",
            ),
            needed_bytes=needed,
            limit_bytes=limit,
            path=largest,
            op="gather of all leaves",
        )
    return dataclasses.replace(program, limit_bytes=limit)


def _gather_first(program: Program, bucket_bytes: int) -> Program:
    """Gathers all leaves at the start and frees them after the last op that computes."""
    values, leaves = list(program.values), program.leaves
    names: dict[int, int] = {}
    head: list[Op] = []
    token = 1 + max((op.token for op in program.ops if isinstance(op, Wait)), default=-1)
    for group in buckets(leaves, (), {}, bucket_bytes, range(len(leaves))):
        if leaves[group[0]].resident:
            continue
        outs = []
        for i in group:
            names[leaves[i].full] = len(values)
            outs.append(len(values))
            spec = leaves[i].spec
            values.append(Value(leaves[i].path, spec, len(values), spec.nbytes, "copy"))
        axis = leaves[group[0]].layouts.params.axis
        assert axis is not None
        head += [Gather(axis, group, tuple(outs), token), Wait(token)]
        token += 1
    for at, value in enumerate(values):
        if value.owner in names and at != value.owner:
            values[at] = dataclasses.replace(value, owner=names[value.owner], role="copy")
    body = [_renamed(op, names) for op in program.ops]
    computing = [at for at, op in enumerate(body) if isinstance(op, Compute | Collective | Call)]
    end = computing[-1] + 1 if computing else 0
    freed = [Free(tuple(names.values()))] if names else []
    ops = (*head, *body[:end], *freed, *body[end:])
    return dataclasses.replace(program, ops=ops, values=tuple(values))


def _renamed(op: Op, names: dict[int, int]) -> Op:
    """An op that reads copies in place of virtual leaves."""

    def new(value: int) -> int:
        return names.get(value, value)

    if isinstance(op, Compute):
        return dataclasses.replace(op, args=map_refs(op.args, new), kwargs=map_refs(op.kwargs, new))
    if isinstance(op, Collective):
        return dataclasses.replace(op, source=new(op.source))
    if isinstance(op, Call):
        return dataclasses.replace(op, leaves=tuple(map(new, op.leaves)))
    return op
