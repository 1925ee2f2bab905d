"""Cost: FLOPs, bytes on the network and modelled seconds of a program, from `Hardware` alone.

One op takes the longer of its arithmetic and its memory traffic (the roofline of Williams et al.
2009); a collective takes a fixed time per message and the bytes of the busiest direction of one
rank's link. A step is two queues, compute and network: an op starts when the one before it in its
queue is done, a collective not before it is issued, and a wait holds compute until its collective
is done.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from zfunc.comm.pieces import DIRECT_BYTES
from zfunc.layout import ShapeDtype
from zfunc.meshes import Hardware, chunk_numel
from zfunc.program.bound import least_gathered_bytes
from zfunc.program.flops import operator_flops
from zfunc.program.ir import (
    Accumulate,
    Collective,
    Compute,
    Gather,
    Op,
    Program,
    Reduce,
    Ref,
    Status,
    Update,
    Value,
    Wait,
    reads,
    writes,
)
from zfunc.program.text import bytes_text

__all__ = ["Cost", "cost_analysis", "op_flops", "op_seconds", "traffic"]

# Memory passes of an update over one piece: AdamW's four reads and three writes, and the norm.
_UPDATE_PASSES = 8

_PICKS = ("aten::index", "aten::embedding", "aten::gather", "aten::index_select")


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What one rank does in one run of a program.

    Attributes:
        flops: multiplications and additions, see `zfunc.program.flops`.
        gathered_bytes: bytes of all copies that are gathered, each at its full size.
        least_gathered_bytes: no program with these accesses and this budget gathers less, see
            `zfunc.program.bound`; without a budget, each leaf once.
        reduced_bytes: bytes of all gradients that are reduced, each at its full size.
        network_bytes: bytes that the busiest rank receives; it sends about as many.
        num_messages: messages that one rank sends.
        compute_s: modelled time of all compute ops.
        communication_s: modelled time of all collectives.
        step_s: modelled time of the whole program.
        exposed_communication_s: the part of it in which compute waits for a collective.
        bound_s: the longer of `compute_s` and `communication_s`: what perfect overlap would take.
    """

    flops: int
    gathered_bytes: int
    least_gathered_bytes: int
    reduced_bytes: int
    network_bytes: int
    num_messages: int
    compute_s: float
    communication_s: float
    step_s: float
    exposed_communication_s: float
    bound_s: float

    def __str__(self) -> str:
        ratio = self.gathered_bytes / max(self.least_gathered_bytes, 1)
        rows = [
            ("arithmetic", f"{self.flops / 1e9:.4g} GFLOP"),
            ("gathered", f"{bytes_text(self.gathered_bytes)}, {ratio:.3f} x the least possible"),
            ("reduced", bytes_text(self.reduced_bytes)),
            ("network", f"{bytes_text(self.network_bytes)} in {self.num_messages} messages"),
            ("compute", f"{self.compute_s * 1e3:.4g} ms"),
            ("communication", f"{self.communication_s * 1e3:.4g} ms"),
            ("exposed", f"{self.exposed_communication_s * 1e3:.4g} ms"),
            ("step", f"{self.step_s * 1e3:.4g} ms, bound {self.bound_s * 1e3:.4g} ms"),
        ]
        return "\n".join(f"{name:<15}{text}" for name, text in rows)


def cost_analysis(program: Program, hw: Hardware, axes: Mapping[str, int]) -> Cost:
    """Counts and times a program on paper.

    Args:
        program: a program after `pack` or a later pass.
        hw: the rates.
        axes: the size of each axis of the mesh.

    Returns:
        Counts and modelled seconds of one rank.
    """
    moved = [traffic(op, program, axes) for op in program.ops]
    clock = _Clock()
    for op in program.ops:
        clock.run(op, op_seconds(op, program, hw, axes))
    return Cost(
        flops=sum(op_flops(op, program) for op in program.ops if isinstance(op, Compute)),
        gathered_bytes=_sizes(program, (v for op in program.ops for v in _gathered(op))),
        least_gathered_bytes=least_gathered_bytes(program),
        reduced_bytes=_sizes(program, (v for op in program.ops for v in _reduced(op))),
        network_bytes=sum(nbytes for nbytes, _ in moved),
        num_messages=sum(messages for _, messages in moved),
        compute_s=clock.compute_s,
        communication_s=clock.network_s,
        step_s=max(clock.now, clock.network_free),
        exposed_communication_s=clock.exposed_s,
        bound_s=max(clock.compute_s, clock.network_s),
    )


def op_seconds(op: Op, program: Program, hw: Hardware, axes: Mapping[str, int]) -> float:
    """The modelled time of one op: of a collective on the network, of any other in compute.

    Args:
        op: an op of the program.
        program: the program.
        hw: the rates.
        axes: the size of each axis of the mesh.

    Returns:
        Seconds; 0 for views, waits and frees, and for a `Call`, of which nothing is known.
    """
    if isinstance(op, Compute):
        touched = _touched_bytes(op, program.values)
        return max(op_flops(op, program) / hw.flops_per_s, touched / hw.memory_bytes_per_s)
    if isinstance(op, Gather | Reduce | Collective | Status):
        nbytes, messages = traffic(op, program, axes)
        return nbytes / hw.network_bytes_per_s + messages * hw.message_s
    if isinstance(op, Accumulate):
        return 3 * _sizes(program, op.ins) / hw.memory_bytes_per_s
    if isinstance(op, Update):
        layouts = [program.leaves[i] for i in op.leaves]
        pieces = sum(math.prod(leaf.layouts.opt.local_shape) for leaf in layouts)
        return _UPDATE_PASSES * 4 * pieces / hw.memory_bytes_per_s
    return 0.0


def op_flops(op: Compute, program: Program) -> int:
    """Multiplications and additions of one op."""
    values = program.values

    def shape(arg: Any) -> Any:
        return values[arg.id].spec.shape if isinstance(arg, Ref) else arg

    outs = [None if out is None else values[out].spec.shape for out in op.outs]
    return operator_flops(_name(op), [shape(arg) for arg in op.args], outs)


def traffic(op: Op, program: Program, axes: Mapping[str, int]) -> tuple[int, int]:
    """What one op puts on the network.

    A piece of `DIRECT_BYTES` or more is a message of its own; the smaller ones of an op share
    one message per dtype and peer. A sum that stays whole is reduced in pieces and gathered if the
    tensor is large, and sent to every peer as it is otherwise.

    Args:
        op: any op.
        program: the program.
        axes: the size of each axis of the mesh.

    Returns:
        Bytes that the busiest rank receives, and messages that it sends.
    """
    if isinstance(op, Status):
        size = math.prod(axes.values())
        return (size - 1) * 8 * (len(op.grads) + 3), size - 1
    if not isinstance(op, Gather | Reduce | Collective):
        return 0, 0
    size = axes[op.axis]
    if isinstance(op, Reduce):
        specs = [program.values[v].spec for v in op.ins]
        return _pieces(specs, size) if op.scatter else _wholes(specs, size)
    if isinstance(op, Gather):
        return _pieces([program.values[v].spec for v in op.outs], size)
    whole = program.values[op.out if op.name == "gather" else op.source].spec
    return _pieces([whole], size)


def _pieces(specs: Iterable[ShapeDtype], size: int) -> tuple[int, int]:
    """Every rank receives one piece of each tensor from every other."""
    nbytes = direct = 0
    together = set()
    for spec in specs:
        piece = chunk_numel(spec.numel, size) * spec.dtype.itemsize
        nbytes += min((size - 1) * piece, spec.nbytes)
        if piece >= DIRECT_BYTES:
            direct += 1
        elif piece:
            together.add(spec.dtype)
    return (nbytes, (size - 1) * (direct + len(together))) if size > 1 else (0, 0)


def _wholes(specs: Iterable[ShapeDtype], size: int) -> tuple[int, int]:
    """Every rank ends with the whole of each sum."""
    specs = list(specs)
    large = [spec for spec in specs if spec.nbytes >= DIRECT_BYTES]
    small = [spec for spec in specs if spec.nbytes < DIRECT_BYTES]
    pieces = sum(chunk_numel(spec.numel, size) * spec.dtype.itemsize for spec in large)
    nbytes = 2 * pieces + sum(spec.nbytes for spec in small)
    messages = 2 * len(large) + len({spec.dtype for spec in small if spec.numel})
    return (size - 1) * nbytes, (size - 1) * messages


class _Clock:
    """Two queues, compute and network, and what each has done so far."""

    def __init__(self):
        self.now = self.network_free = 0.0
        self.compute_s = self.network_s = self.exposed_s = 0.0
        self.done: dict[int, float] = {}

    def run(self, op: Op, seconds: float) -> None:
        """Lets one op of that length pass."""
        if isinstance(op, Gather | Reduce):
            self.done[op.token] = self._send(seconds)
        elif isinstance(op, Wait):
            self._stall_until(self.done[op.token])
        elif isinstance(op, Collective | Status):
            self._stall_until(self._send(seconds))
        else:
            self.compute_s += seconds
            self.now += seconds

    def _send(self, seconds: float) -> float:
        self.network_s += seconds
        self.network_free = max(self.now, self.network_free) + seconds
        return self.network_free

    def _stall_until(self, done: float) -> None:
        self.exposed_s += max(0.0, done - self.now)
        self.now = max(self.now, done)


def _name(op: Compute) -> str:
    schema = getattr(op.target, "_schema", None)
    return "" if schema is None else schema.name


def _touched_bytes(op: Compute, values: tuple[Value, ...]) -> int:
    """Bytes that an op reads and writes; none for a view, of a table only the rows picked."""
    outs = writes(op)
    made = sum(values[out].spec.nbytes for out in outs)
    schema = getattr(op.target, "_schema", None)
    mutable = schema is not None and schema.is_mutable
    if not mutable and all(values[out].owner != out for out in outs):
        return 0
    if _name(op) in _PICKS:
        return 2 * made
    return made + sum(values[value].spec.nbytes for value in dict.fromkeys(reads(op)))


def _sizes(program: Program, values: Iterable[int]) -> int:
    return sum(program.values[value].spec.nbytes for value in values)


def _gathered(op: Op) -> tuple[int, ...]:
    return op.outs if isinstance(op, Gather) else ()


def _reduced(op: Op) -> tuple[int, ...]:
    return op.ins if isinstance(op, Reduce) else ()
