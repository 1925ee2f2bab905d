"""Memory: what a rank holds at every op of a program, found by walking it once.

Live bytes are what sharding adds while a step runs: gathered copies and values derived from leaves
(from their making to their free), full gradients that await their reduce, and the buffers that
collectives in flight receive into. They are the same on every rank, so that ranks plan alike.
Activations live from their making to their last use; reduced gradients to the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from zfunc.comm.pieces import DIRECT_BYTES
from zfunc.layout import ShapeDtype
from zfunc.meshes import chunk_numel
from zfunc.program.ir import Free, Gather, Leaf, Op, Program, Reduce, Status, Wait, reads, writes
from zfunc.program.text import bytes_text, op_text

__all__ = ["Memory", "memory_analysis", "staging_bytes"]

_LIVE = ("copy", "derived", "grad")


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        params_bytes: this rank's pieces of the parameters.
        grads_bytes: its reduced gradients.
        opt_bytes: its optimizer state.
        unsharded_params_bytes: all parameters.
        unsharded_grads_bytes: all gradients.
        unsharded_opt_bytes: all optimizer state.
        inputs_bytes: the tensors of its micro-batches.
        constants_bytes: tensors that the function makes from Python data.
        peak_live_bytes: the most live bytes at any op.
        peak_live_op: the index of the first op at which they are reached; -1 without ops.
        peak_live_text: that op, printed.
        peak_activation_bytes: the most bytes of activations at any op.
        peak_total_bytes: parameters, optimizer state, inputs and constants, and the most of live
            bytes, activations and reduced gradients together at any op.
        live_bytes: live bytes during each op.
        activation_bytes: bytes of activations during each op.
    """

    params_bytes: int
    grads_bytes: int
    opt_bytes: int
    unsharded_params_bytes: int
    unsharded_grads_bytes: int
    unsharded_opt_bytes: int
    inputs_bytes: int
    constants_bytes: int
    peak_live_bytes: int
    peak_live_op: int
    peak_live_text: str
    peak_activation_bytes: int
    peak_total_bytes: int
    live_bytes: tuple[int, ...] = dataclasses.field(repr=False)
    activation_bytes: tuple[int, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        rows = [
            ("parameters", self.params_bytes, self.unsharded_params_bytes, ""),
            ("gradients", self.grads_bytes, self.unsharded_grads_bytes, ""),
            ("optimizer state", self.opt_bytes, self.unsharded_opt_bytes, ""),
            ("inputs, constants", self.inputs_bytes + self.constants_bytes, None, ""),
            ("live, peak", self.peak_live_bytes, None, self._where()),
            ("activations, peak", self.peak_activation_bytes, None, ""),
            ("total, peak", self.peak_total_bytes, None, ""),
        ]
        lines = [f"{'bytes of one rank':<20}{'sharded':>10}{'unsharded':>12}"]
        for name, sharded, unsharded, note in rows:
            right = "" if unsharded is None else bytes_text(unsharded)
            lines.append(f"{name:<20}{bytes_text(sharded):>10}{right:>12}{note}".rstrip())
        return "\n".join(lines)

    def _where(self) -> str:
        if self.peak_live_op < 0:
            return ""
        text = self.peak_live_text
        return f"  at op {self.peak_live_op}: {text if len(text) <= 60 else text[:57] + '...'}"


def memory_analysis(
    program: Program,
    axes: Mapping[str, int],
    *,
    opt_bytes: int = 0,
    unsharded_opt_bytes: int = 0,
) -> Memory:
    """Walks a program and counts what a rank holds.

    Args:
        program: a program after `pack` or a later pass.
        axes: the size of each axis of the mesh.
        opt_bytes: this rank's optimizer state, which a program does not describe.
        unsharded_opt_bytes: the same without sharding.

    Returns:
        The bytes of this rank. Live bytes at an op include what the op makes, and what it frees or
        awaits.
    """
    live, activations, shards = _Walk(program, axes).run()
    peak = max(live, default=0)
    where = live.index(peak) if live else -1
    params = [leaf for leaf in program.leaves if leaf.is_param]
    trained = [leaf for leaf in params if leaf.trainable and program.mode != "forward"]
    inputs = _owned(program, (v for micro in program.micros for v in micro.inputs))
    constants = sum(t.untyped_storage().nbytes() for t in program.constants.values())
    params_bytes = sum(_stored_bytes(leaf, leaf.layouts.params.local_shape) for leaf in params)
    both = max(map(sum, zip(live, activations, shards, strict=True)), default=0)
    return Memory(
        params_bytes=params_bytes,
        grads_bytes=_reduced_bytes(program, trained),
        opt_bytes=opt_bytes,
        unsharded_params_bytes=sum(_stored_bytes(leaf, leaf.spec.shape) for leaf in params),
        unsharded_grads_bytes=sum(leaf.spec.nbytes for leaf in trained),
        unsharded_opt_bytes=unsharded_opt_bytes,
        inputs_bytes=inputs,
        constants_bytes=constants,
        peak_live_bytes=peak,
        peak_live_op=where,
        peak_live_text=op_text(program.ops[where], program) if live else "",
        peak_activation_bytes=max(activations, default=0),
        peak_total_bytes=params_bytes + opt_bytes + inputs + constants + both,
        live_bytes=tuple(live),
        activation_bytes=tuple(activations),
    )


def staging_bytes(spec: ShapeDtype, size: int, *, cast: bool = False) -> int:
    """Bytes that gathering one tensor needs besides the copy.

    Args:
        spec: the whole tensor, in the dtype in which it travels.
        size: the ranks of the axis.
        cast: whether its pieces are cast before they travel.

    Returns:
        What the rank that receives most receives before it is copied to its place, 0 for a tensor
        that is received in place; and the piece that is cast.

    Example:
        >>> import torch
        >>> staging_bytes(ShapeDtype((5,), torch.float32), 2), staging_bytes(
        ...     ShapeDtype((1 << 20,), torch.float32), 2
        ... )
        (12, 0)
    """
    piece = chunk_numel(spec.numel, size) * spec.dtype.itemsize
    received = 0 if piece >= DIRECT_BYTES else min((size - 1) * piece, spec.nbytes)
    return received + piece * cast


class _Walk:
    """One pass over the ops with the storages that are alive."""

    def __init__(self, program: Program, axes: Mapping[str, int]):
        self.program = program
        self.axes = axes
        self.owner = [value.owner for value in program.values]
        self.alive: set[int] = set()
        self.buffers: dict[int, int] = {}
        self.held: dict[str, int] = dict.fromkeys((*_LIVE, "activation", "shard", "buffer"), 0)
        self.last = self._last_uses()

    def run(self) -> tuple[list[int], list[int], list[int]]:
        """Live bytes, activations and reduced gradients during each op."""
        live, activations, shards = [], [], []
        for at, op in enumerate(self.program.ops):
            self._make(op)
            live.append(sum(self.held[role] for role in (*_LIVE, "buffer")))
            activations.append(self.held["activation"])
            shards.append(self.held["shard"])
            self._drop(op, at)
        return live, activations, shards

    def _last_uses(self) -> dict[int, int]:
        """The last op that makes or reads each storage; outputs last to the end."""
        last: dict[int, int] = {}
        for at, op in enumerate(self.program.ops):
            last |= {self.owner[value]: at for value in (*reads(op), *writes(op))}
        for micro in self.program.micros:
            kept = (micro.loss, micro.weight, *micro.aux, *self._unreduced(micro.grads))
            last |= {self.owner[v]: len(self.program.ops) for v in kept if v is not None}
        return last

    def _unreduced(self, grads: Iterable[int | None]) -> list[int]:
        """The gradients that are results as they are, before `accumulate`."""
        values = self.program.values
        return [g for g in grads if g is not None and values[self.owner[g]].role == "activation"]

    def _make(self, op: Op) -> None:
        for value in writes(op):
            owner = self.program.values[self.owner[value]]
            if owner.owner not in self.alive and owner.role in self.held:
                self.alive.add(owner.owner)
                self.held[owner.role] += owner.nbytes
        if isinstance(op, Gather):
            leaves = [self.program.leaves[i] for i in op.leaves]
            size = self.axes[op.axis]
            self._issue(
                op.token, sum(staging_bytes(leaf.spec, size, cast=leaf.is_cast) for leaf in leaves)
            )
        elif isinstance(op, Reduce):
            self._issue(op.token, op.receive_bytes)

    def _issue(self, token: int, nbytes: int) -> None:
        self.buffers[token] = nbytes
        self.held["buffer"] += nbytes

    def _drop(self, op: Op, at: int) -> None:
        if isinstance(op, Wait):
            self.held["buffer"] -= self.buffers.pop(op.token, 0)
        elif isinstance(op, Free):
            for value in op.values:
                self._release(self.owner[value])
        for value in (*reads(op), *writes(op)):
            owner = self.owner[value]
            if self.last[owner] == at and self.program.values[owner].role == "activation":
                self._release(owner)

    def _release(self, owner: int) -> None:
        if owner in self.alive:
            self.alive.remove(owner)
            self.held[self.program.values[owner].role] -= self.program.values[owner].nbytes


def _owned(program: Program, values: Iterable[int]) -> int:
    """Bytes of the storages of some values, each storage once."""
    return sum(program.values[o].nbytes for o in {program.values[v].owner for v in values})


def _stored_bytes(leaf: Leaf, shape: tuple[int, ...]) -> int:
    return ShapeDtype(shape, leaf.dtypes.stored).nbytes


def _reduced_bytes(program: Program, trained: list[Leaf]) -> int:
    """Bytes of the gradients that the status op sees, or will see once they are reduced."""
    for op in program.ops:
        if isinstance(op, Status):
            return _owned(program, (grad for grad in op.grads if grad is not None))
    shapes = [(leaf.layouts.grads.local_shape, leaf.reduced_dtype) for leaf in trained]
    return sum(ShapeDtype(shape, dtype).nbytes for shape, dtype in shapes)
