"""Text: a program printed one op a line, in the spirit of a jaxpr.

The format is stable: tests compare it with stored files, and errors point at its lines.

    text    = header { in } { derive } { op } [ "..." INT "more ops" ] { out }
    header  = "program" NAME MODE [ mesh ] [ "live<=" BYTES ] "ops" INT "digest" HEX
    mesh    = "mesh[" AXIS ":" SIZE { " " AXIS ":" SIZE } "]"
    in      = "in" "micro" INT { typed } [ "key" VALUE ]
    out     = "out" "micro" INT [ "loss" VALUE ] [ "weight" VALUE ] [ "aux" VALUES ]
    derive  = "derive" outs "=" call                      only before the pass `pack`
    op      = INDEX kind
    kind    = "compute" outs "=" call PHASE [ "remat" REGION { "/" REGION } ] [ "micro" INT ]
            | "gather" VALUE "=" LEAF ":" spec { "," ... } BYTES "over" AXIS TOKEN
            | "reduce" typed "=" LEAF "of" VALUE { "," ... } "received" BYTES
              "over" AXIS [ "whole" ] TOKEN
            | "wait" TOKEN
            | "free" VALUE [ "=" LEAF ] { "," ... } BYTES
            | "accumulate" VALUE "+=" VALUE { "," ... }
            | "collective" typed "=" NAME "(" VALUE ")" "over" AXIS [ "micro" INT ]
            | "call" "of" VALUES [ "loss" VALUE "weight" VALUE ] [ "grads" typed { "," typed } ]
              [ "micro" INT ]
            | "rng" ACTION SLOT
            | "status" "losses" VALUES [ "weights" VALUES ] "grads" INT "of" INT
            | "update" INT "leaves" [ HOW ]
    outs    = typed | "(" typed { "," typed } ")"         "_" for a result that nobody reads
    typed   = VALUE [ "~" VALUE ] ":" spec                after "~" the value whose storage it uses
    call    = OPERATOR "(" arguments ")"
    spec    = DTYPE "[" sizes "]"

A value is `v` and its index, a virtual leaf is its path. A path is short: `h[1].qkv` stands for
`params['h'][1]['qkv']`; paths of other arguments are spelled out. A token is `#` and its number.
BYTES is a number with a unit, GB = 1e9 bytes.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from typing import Any

import torch

from zfunc.layout import ShapeDtype
from zfunc.program.digest import digest, spec_text
from zfunc.program.ir import (
    Accumulate,
    Call,
    Collective,
    Compute,
    Free,
    Gather,
    Leaf,
    Micro,
    Op,
    Program,
    Reduce,
    Ref,
    Rng,
    Status,
    Update,
    Wait,
)

__all__ = ["as_text", "bytes_text", "op_text", "short_path", "text_digest"]


def as_text(program: Program, *, max_lines: int | None = None, update: str | None = None) -> str:
    """Prints a program, one op a line, in the format of this module's docstring.

    Args:
        program: a program after any pass.
        max_lines: how many ops to print; None for all.
        update: how the update runs ("fused" or "generic"), if known.

    Returns:
        The text, without a newline at its end. It holds no addresses: equal programs print alike.
    """
    printer = _Printer(program, update)
    count = len(program.ops) if max_lines is None else min(max_lines, len(program.ops))
    lines = [printer.header()]
    lines += [printer.inputs(number, micro) for number, micro in enumerate(program.micros)]
    for op in {id(op): op for op in program.derived.values()}.values():
        lines.append(f"      derive     {printer.equation(op)}")
    lines += [f"{at:>5} {printer.op(program.ops[at])}" for at in range(count)]
    if count < len(program.ops):
        lines.append(f"  ... {len(program.ops) - count} more ops")
    lines += [printer.outputs(number, micro) for number, micro in enumerate(program.micros)]
    return "\n".join(lines)


def text_digest(program: Program) -> bytes:
    """Hashes everything that `as_text` prints, compute ops included.

    Args:
        program: a program after any pass.

    Returns:
        16 bytes.
    """
    return hashlib.blake2b(as_text(program).encode(), digest_size=16).digest()


def op_text(op: Op, program: Program) -> str:
    """One op as `as_text` prints it, without its index."""
    return _Printer(program).op(op)


def bytes_text(nbytes: int) -> str:
    """A number of bytes with three significant digits and a unit.

    Example:
        >>> [bytes_text(n) for n in (0, 999, 1536, 906_000_000, 1_740_000_000)]
        ['0B', '999B', '1.54kB', '906MB', '1.74GB']
    """
    if nbytes < 1000:
        return f"{nbytes}B"
    size, power = nbytes / 1000, 1
    while size >= 999.5 and power < 4:
        size, power = size / 1000, power + 1
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f}{('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def short_path(leaf: Leaf) -> str:
    """The path of a leaf as this module prints it.

    A key that is an identifier becomes an attribute; what is left over of `params` is dropped.
    """
    if not leaf.is_param:
        return leaf.path
    path = re.sub(r"\['([^\W\d]\w*)'\]", r".\1", leaf.path)
    return path.removeprefix("params").removeprefix(".") or path


class _Printer:
    """Prints parts of one program; one method per op, named like the op."""

    def __init__(self, program: Program, how: str | None = None):
        self.program = program
        self.how = how

    @functools.cached_property
    def leaves(self) -> dict[int, str]:
        """The printed name of each virtual leaf."""
        return {leaf.full: short_path(leaf) for leaf in self.program.leaves}

    @functools.cached_property
    def copies(self) -> dict[int, str]:
        """The printed name of the leaf that each gathered copy is of."""
        return {
            out: self.leaf(i)
            for op in self.program.ops
            if isinstance(op, Gather)
            for i, out in zip(op.leaves, op.outs, strict=True)
        }

    def header(self) -> str:
        program = self.program
        meshes = {str(leaf.layouts.params.mesh): None for leaf in program.leaves}
        limit = program.limit_bytes
        budget = [] if limit is None else [f"live<={bytes_text(limit)}"]
        return "  ".join(
            [
                f"program {program.name} {program.mode}",
                *meshes,
                *budget,
                f"ops {len(program.ops)}",
                f"digest {digest(program).hex()[:8]}",
            ]
        )

    def inputs(self, number: int, micro: Micro) -> str:
        parts = [f"      in         micro {number}", *map(self.typed, micro.inputs)]
        return "  ".join(parts + ([] if micro.key is None else [f"key {self.name(micro.key)}"]))

    def outputs(self, number: int, micro: Micro) -> str:
        parts = [f"      out        micro {number}"]
        if micro.loss is not None:
            parts.append(f"loss {self.name(micro.loss)}")
        if micro.weight is not None:
            parts.append(f"weight {self.name(micro.weight)}")
        if micro.aux:
            parts.append(f"aux {self.names(micro.aux)}")
        return "  ".join(parts)

    def name(self, value: int) -> str:
        return self.leaves.get(value, f"v{value}")

    def names(self, values: Iterable[int]) -> str:
        return ", ".join(map(self.name, values))

    def typed(self, value: int) -> str:
        info = self.program.values[value]
        alias = "" if info.owner == value else f"~{self.name(info.owner)}"
        return f"{self.name(value)}{alias}:{spec_text(info.spec)}"

    def leaf(self, index: int) -> str:
        return self.leaves[self.program.leaves[index].full]

    def op(self, op: Op) -> str:
        method = getattr(self, type(op).__name__.lower())
        return f"{type(op).__name__.lower():<10} {method(op)}"

    def equation(self, op: Compute) -> str:
        outs = ["_" if out is None else self.typed(out) for out in op.outs]
        left = f"({', '.join(outs)})" if op.packed else outs[0]
        arguments = [self.argument(arg) for arg in op.args]
        arguments += [f"{key}={self.argument(value)}" for key, value in op.kwargs]
        return f"{left} = {_operator(op.target)}({', '.join(arguments)})"

    def argument(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            return self.name(arg.id)
        if isinstance(arg, list):
            return f"[{', '.join(map(self.argument, arg))}]"
        if isinstance(arg, tuple):
            return f"({', '.join(map(self.argument, arg))})"
        if isinstance(arg, dict):
            return f"{{{', '.join(f'{key}: {self.argument(arg[key])}' for key in arg)}}}"
        return _constant(arg)

    def compute(self, op: Compute) -> str:
        regions = [f"remat {'/'.join(op.regions)}"] if op.regions else []
        return "  ".join([self.equation(op), op.phase, *regions, *_micro(op.micro)])

    def gather(self, op: Gather) -> str:
        pairs = zip(op.leaves, op.outs, strict=True)
        parts = [f"v{out}={self.leaf(i)}:{self._spec(out)}" for i, out in pairs]
        return f"{', '.join(parts)}  {self._bytes(op.outs)} over {op.axis} #{op.token}"

    def reduce(self, op: Reduce) -> str:
        rows = zip(op.outs, op.leaves, op.ins, strict=True)
        parts = [f"{self.typed(out)} = {self.leaf(i)} of {self.name(v)}" for out, i, v in rows]
        whole = "" if op.scatter else " whole"
        received = f"received {bytes_text(op.receive_bytes)} over {op.axis}{whole} #{op.token}"
        return f"{', '.join(parts)}  {received}"

    def wait(self, op: Wait) -> str:
        return f"#{op.token}"

    def free(self, op: Free) -> str:
        known = self.copies
        parts = [f"v{v}={known[v]}" if v in known else self.name(v) for v in op.values]
        owners = dict.fromkeys(self.program.values[v].owner for v in op.values)
        return f"{', '.join(parts)}  {self._bytes(owners)}"

    def accumulate(self, op: Accumulate) -> str:
        pairs = zip(op.into, op.ins, strict=True)
        return ", ".join(f"{self.name(into)} += {self.name(v)}" for into, v in pairs)

    def collective(self, op: Collective) -> str:
        made = f"{self.typed(op.out)} = {op.name}({self.name(op.source)})"
        return "  ".join([f"{made}  over {op.axis}", *_micro(op.micro)])

    def call(self, op: Call) -> str:
        ends = [("loss", op.loss), ("weight", op.weight)]
        parts = [f"of {self.names(op.leaves)}"]
        parts += [f"{what} {self.name(value)}" for what, value in ends if value is not None]
        parts += [f"grads {', '.join(map(self.typed, op.grads))}"] if op.grads else []
        return "  ".join([*parts, *_micro(op.micro)])

    def rng(self, op: Rng) -> str:
        return f"{op.action} {op.slot}"

    def status(self, op: Status) -> str:
        parts = [f"losses {self.names(op.losses)}"]
        parts += [f"weights {self.names(op.weights)}"] if op.weights else []
        present = sum(grad is not None for grad in op.grads)
        return "  ".join([*parts, f"grads {present} of {len(op.grads)}"])

    def update(self, op: Update) -> str:
        return "  ".join([f"{len(op.leaves)} leaves", *([self.how] if self.how else [])])

    def _spec(self, value: int) -> str:
        return spec_text(self.program.values[value].spec)

    def _bytes(self, values: Iterable[int]) -> str:
        return bytes_text(sum(self.program.values[v].nbytes for v in values))


def _micro(number: int) -> list[str]:
    return [f"micro {number}"] if number else []


def _operator(target: Any) -> str:
    """The name of an operator without its overload if that is the default one."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__qualname__", type(target).__name__)


def _constant(arg: Any) -> str:
    """An argument that is no value of the program; never an address."""
    if isinstance(arg, torch.dtype | torch.layout | torch.memory_format):
        return str(arg).removeprefix("torch.")
    if arg is None or isinstance(arg, bool | int | float | complex | str):
        return repr(arg)
    if isinstance(arg, torch.device):
        return str(arg)
    if isinstance(arg, torch.Tensor):
        return f"<tensor {spec_text(ShapeDtype(tuple(arg.shape), arg.dtype))}>"
    return f"<{getattr(arg, '__qualname__', type(arg).__name__)}>"
