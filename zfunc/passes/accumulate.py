"""Accumulate: micro-batches in a row become one step, with gradients reduced and summed.

A gradient that is sharded is reduced per micro-batch, as soon as its bucket is complete, and summed
into a sharded accumulator; a replicated one is summed locally and reduced once. Either way the
order of every sum is fixed: over the last mesh axis first, ranks in rank order, then micro-batches
in order. A reduce is awaited at once here; `order` gives it time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from zfunc.layout import ShapeDtype
from zfunc.meshes import Mesh, chunk_numel, shard_range
from zfunc.passes.buckets import BUCKET_BYTES, buckets, first_uses
from zfunc.passes.union import with_weight
from zfunc.program.ir import (
    Accumulate,
    Call,
    Collective,
    Compute,
    Free,
    Leaf,
    Micro,
    Op,
    Program,
    Reduce,
    Ref,
    Status,
    Update,
    Value,
    Wait,
    map_refs,
    reads,
    writes,
)

__all__ = ["accumulate"]


def accumulate(
    micros: Sequence[Program],
    mesh: Mesh,
    *,
    update: bool,
    bucket_bytes: int = BUCKET_BYTES,
    leaf_order: Sequence[int] | None = None,
    grad_order: Sequence[int] | None = None,
    once: bool = False,
) -> Program:
    """Joins captured micro-batches to one program.

    Args:
        micros: one captured program per micro-batch, all of the same parameters.
        mesh: the mesh that gradients are summed over.
        update: whether an optimizer update follows (mode "step"), else the gradients are results.
        bucket_bytes: see `buckets`.
        leaf_order: see `buckets`.
        grad_order: the leaves in the order in which ranks agreed to reduce their gradients, which
            then wait for one another; None to reduce each bucket as soon as it is complete.
        once: sum every gradient locally and reduce it once, whatever its spec says.

    Returns:
        A program in mode "step", "grad" or "forward".
    """
    if any(m.weight is not None for micro in micros for m in micro.micros):
        micros = [with_weight(micro) for micro in micros]
    join = _Join(mesh, update, once)
    for number, micro in enumerate(micros):
        join.append(micro, number)
    if micros[0].mode == "forward":
        # A rank that failed would send zeros into the function's own collectives: all must know.
        asks = any(isinstance(op, Collective) for op in join.ops)
        return join.program(micros[0].name, "forward", [Status((), (), ())] if asks else [])
    order = first_uses(tuple(join.leaves), join.ops, {}) if leaf_order is None else leaf_order
    order = dict.fromkeys([*order, *join.with_grads()])
    groups = [
        tuple(i for i in group if join.leaves[i].trainable)
        for group in buckets(tuple(join.leaves), join.ops, {}, bucket_bytes, list(order))
    ]
    groups = [group for group in groups if group]
    if grad_order is not None:
        turn = {leaf: at for at, leaf in enumerate(grad_order)}
        groups.sort(key=lambda group: max((turn[i] for i in group if i in turn), default=-1))
    reduced = join.reduce(groups, in_order=grad_order is not None)
    tail: list[Op] = [
        Status(
            tuple(m.loss for m in join.micros if m.loss is not None),
            tuple(m.weight for m in join.micros if m.weight is not None),
            reduced,
        )
    ]
    trainable = tuple(i for i, leaf in enumerate(join.leaves) if leaf.trainable)
    if update:
        tail.append(Update(trainable, reduced))
    return join.program(micros[0].name, "step" if update else "grad", tail)


class _Join:
    """The program under construction: one table of values, one list of ops."""

    def __init__(self, mesh: Mesh, update: bool, once: bool):
        self.mesh = mesh
        self.update = update
        self.once = once
        self.leaves: list[Leaf] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.micros: list[Micro] = []
        self.constants = {}
        self.token = 0

    def program(self, name: str, mode: str, tail: list[Op]) -> Program:
        ops = (*self.ops, *tail)
        return Program(
            name,
            mode,
            tuple(self.leaves),
            tuple(self.values),
            ops,
            {},
            self.constants,
            tuple(self.micros),
        )

    def append(self, micro: Program, number: int) -> None:
        """Appends the ops of one micro-batch under new value ids; parameters keep theirs."""
        known = {leaf.path: leaf.full for leaf in self.leaves if leaf.is_param}
        names = {
            leaf.full: known[leaf.path]
            for leaf in micro.leaves
            if leaf.is_param and leaf.path in known
        }
        offset = len(self.values)
        fresh = [i for i in range(len(micro.values)) if i not in names]
        names |= {old: offset + k for k, old in enumerate(fresh)}
        for old in fresh:
            value = micro.values[old]
            self.values.append(dataclasses.replace(value, owner=names[value.owner]))
        for leaf in micro.leaves:
            if not (leaf.is_param and leaf.path in known):
                self.leaves.append(dataclasses.replace(leaf, full=names[leaf.full]))
        self.constants |= {names[old]: tensor for old, tensor in micro.constants.items()}
        self.ops += [_rename(op, names, number) for op in micro.ops]
        (ends,) = micro.micros
        self.micros.append(_rename_micro(ends, names))

    def reduce(self, groups: list[tuple[int, ...]], *, in_order: bool) -> tuple[int | None, ...]:
        """Inserts reduces and accumulation; returns each trainable leaf's reduced gradient."""
        sums: dict[int, int] = {}
        after: dict[int, list[Op]] = {}
        done = self._last_touches()
        at = -1
        for micro in self.micros:
            for group in groups:
                fresh = {i: grad for i in group if (grad := micro.grads[i]) is not None}
                if not fresh:
                    continue
                complete = max(done[grad] for grad in fresh.values())
                at = max(complete, at) if in_order else complete
                emit = after.setdefault(at, [])
                for i, grad in fresh.items():
                    self._mark(grad, "grad" if self._steps(i) else "shard")
                reduces = self._per_micro(group[0]) and bool(self._steps(group[0]))
                self._cast(fresh, emit, on_the_way=reduces)
                if reduces:
                    self._reduce_into(list(fresh), fresh, emit)
                _add(fresh, sums, emit)
        end = after.setdefault(len(self.ops) - 1, [])
        for group in groups:
            if not self._per_micro(group[0]):
                self._reduce_into([i for i in group if i in sums], sums, end)
        self.ops = [new for at, op in enumerate(self.ops) for new in (op, *after.get(at, ()))]
        return tuple(sums.get(i) for i, leaf in enumerate(self.leaves) if leaf.trainable)

    def with_grads(self) -> list[int]:
        """The leaves that have a gradient, which the ops need not read."""
        return sorted({i for m in self.micros for i, g in enumerate(m.grads) if g is not None})

    def _last_touches(self) -> dict[int, int]:
        """The last op that makes or reads each gradient or shares its storage.

        What the backward pass hands to several inputs is the gradient of one, read on for others.
        """
        touched: dict[int, int] = {}
        for at, op in enumerate(self.ops):
            for value in (*reads(op), *writes(op)):
                touched[self.values[value].owner] = at
        grads = [g for m in self.micros for g in m.grads if g is not None]
        return {grad: touched[self.values[grad].owner] for grad in grads}

    def _per_micro(self, leaf: int) -> bool:
        """Whether each micro-batch's gradient is reduced by itself."""
        return not self.once and self.leaves[leaf].layouts.grads.axis is not None

    def _reduce_into(self, leaves: list[int], grads: dict[int, int], emit: list[Op]) -> None:
        """Sums the gradients of leaves over the mesh; `grads` then names the sums."""
        if not leaves:
            return
        numels = [self.values[grads[i]].spec.numel for i in leaves]
        steps = self._steps(leaves[0])
        for step, (axis, scatter) in enumerate(steps):
            ins = tuple(grads[i] for i in leaves)
            size = self.mesh.axis_size(axis)
            if scatter:
                numels = [chunk_numel(numel, size) for numel in numels]
            # A whole sum that a later reduce cuts still counts as a full gradient.
            awaits_cut = not scatter and any(cuts for _, cuts in steps[step:])
            role = "grad" if awaits_cut else "shard"
            outs = tuple(
                self._sum_value(i, axis if scatter else None, grads[i], role) for i in leaves
            )
            itemsizes = [self.values[g].spec.dtype.itemsize for g in ins]
            # What the rank with the largest pieces receives: all ranks plan with the same number.
            pieces = sum(n * itemsize for n, itemsize in zip(numels, itemsizes, strict=True))
            receive = (size - 1) * pieces
            emit += [
                Reduce(axis, tuple(leaves), ins, outs, scatter, self.token, receive),
                Wait(self.token),
                Free(ins),
            ]
            self.token += 1
            grads |= dict(zip(leaves, outs, strict=True))

    def _cast(self, grads: dict[int, int], emit: list[Op], *, on_the_way: bool) -> None:
        """Casts gradients to the dtype of their sums; `grads` then names the casts.

        A reduce that is on the way takes narrower terms as they are.
        """
        for i, grad in grads.items():
            value, dtype = self.values[grad], self.leaves[i].reduced_dtype
            widens = torch.promote_types(value.spec.dtype, dtype) == dtype
            if value.spec.dtype == dtype or (on_the_way and widens):
                continue
            out, spec = len(self.values), ShapeDtype(value.spec.shape, dtype)
            role = self.values[value.owner].role
            self.values.append(Value(f"{value.name} cast", spec, out, spec.nbytes, role))
            self._mark(grad, "grad")
            cast, kwargs = torch.ops.aten._to_copy.default, (("dtype", dtype),)
            emit.append(Compute(cast, (Ref(grad),), kwargs, (out,), False, "backward"))
            emit.append(Free((grad,)))
            grads[i] = out

    def _sum_value(self, leaf: int, axis: str | None, source: int, role: str) -> int:
        """A new value for the sum of one leaf's gradients."""
        spec = ShapeDtype(self.values[source].spec.shape, self.leaves[leaf].reduced_dtype)
        if axis is not None:
            start, stop = shard_range(spec.numel, self.mesh.axis_size(axis), self.mesh.index(axis))
            spec = ShapeDtype((stop - start,), spec.dtype)
        name = f"grad {self.leaves[leaf].path}"
        self.values.append(Value(name, spec, len(self.values), spec.nbytes, role))
        return len(self.values) - 1

    def _mark(self, grad: int, role: str) -> None:
        owner = self.values[grad].owner
        self.values[owner] = dataclasses.replace(self.values[owner], role=role)

    def _steps(self, leaf: int) -> list[tuple[str, bool]]:
        """The axes that a leaf's gradient is summed over, in order, and whether each scatters.

        An update needs the optimizer's piece only; as a result a gradient has its own layout.
        """
        layouts, mesh = self.leaves[leaf].layouts, self.mesh
        target = layouts.opt if self.update else layouts.grads
        return [
            (axis, axis == target.axis) for axis in reversed(mesh.axes) if mesh.axis_size(axis) > 1
        ]


def _add(fresh: dict[int, int], sums: dict[int, int], emit: list[Op]) -> None:
    """Adds the gradients of one micro-batch to the sums of those before it."""
    old = [i for i in fresh if i in sums]
    if old:
        ins = tuple(fresh[i] for i in old)
        emit += [Accumulate(tuple(sums[i] for i in old), ins), Free(ins)]
    sums |= {i: grad for i, grad in fresh.items() if i not in sums}


def _rename(op: Op, names: dict[int, int], micro: int) -> Op:
    """The same op of a captured program under other value ids."""
    if isinstance(op, Compute):
        return dataclasses.replace(
            op,
            args=map_refs(op.args, names.__getitem__),
            kwargs=map_refs(op.kwargs, names.__getitem__),
            outs=tuple(None if out is None else names[out] for out in op.outs),
            micro=micro,
        )
    if isinstance(op, Collective):
        return dataclasses.replace(op, source=names[op.source], out=names[op.out], micro=micro)
    if isinstance(op, Call):
        return Call(
            tuple(names[leaf] for leaf in op.leaves),
            None if op.loss is None else names[op.loss],
            None if op.weight is None else names[op.weight],
            tuple(names[grad] for grad in op.grads),
            micro,
        )
    return op


def _rename_micro(micro: Micro, names: dict[int, int]) -> Micro:
    def new(value: int | None) -> int | None:
        return None if value is None else names[value]

    return Micro(
        tuple(names[value] for value in micro.inputs),
        new(micro.key),
        new(micro.loss),
        new(micro.weight),
        tuple(new(grad) for grad in micro.grads),
        tuple(names[value] for value in micro.aux),
    )
