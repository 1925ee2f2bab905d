"""Programs for tests: captured from a loss, drafted op by op, and run op by op on real tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc import tree
from zfunc.capture import Argument, LeafSlot, describe, to_program, trace_loss
from zfunc.layout import Dtypes, Flat, LeafLayouts, ShapeDtype, layouts_of
from zfunc.meshes import Mesh
from zfunc.program.ir import (
    Compute,
    Free,
    Gather,
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
    reads,
    writes,
)

__all__ = ["Draft", "capture", "draft_step", "interpret", "mlp_loss", "mlp_params"]

aten = torch.ops.aten


def mlp_params() -> Any:
    """Parameters of a small network; no size is divisible by 4."""
    return {
        "h": [{"b": torch.zeros(6), "w": torch.zeros(3, 6)}, {"w": torch.zeros(6, 5)}],
        "out": torch.zeros(5),
    }


def mlp_loss(params: Any, batch: Any) -> Tensor:
    """A loss that reads leaves as they are, transposed, and cast."""
    h = torch.tanh(batch["x"] @ params["h"][0]["w"] + params["h"][0]["b"])
    return ((h @ params["h"][1]["w"].double().float() - params["out"]) ** 2).mean()


def mlp_batch() -> Any:
    """A batch for `mlp_loss`."""
    return {"x": torch.zeros(4, 3)}


def capture(
    loss: Callable[..., Any] = mlp_loss,
    params: Any = None,
    batch: Any = None,
    *,
    axes: Mapping[str, int] | None = None,
    rank: int = 0,
    specs: Any = None,
) -> tuple[Program, Mesh]:
    """Captures a loss as a program of one micro-batch, on a rank of an abstract mesh."""
    mesh = Mesh({"shard": 2} if axes is None else dict(axes), rank=rank)
    leaves, structure = tree.flatten(mlp_params() if params is None else params)
    skeleton = tree.unflatten(structure, leaves)
    paths = tree.leaf_paths(skeleton)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    rows = layouts_of(Flat() if specs is None else specs, skeleton, shapes, paths, mesh)
    slots = tuple(
        LeafSlot(
            path,
            ShapeDtype(tuple(leaf.shape), leaf.dtype),
            row,
            leaf.is_floating_point(),
            Dtypes.plain(leaf.dtype),
        )
        for leaf, path, row in zip(leaves, paths, rows, strict=True)
    )
    inputs, _ = describe(mlp_batch() if batch is None else batch, "batch", mesh.device)
    traced = trace_loss(loss, Argument(structure, slots), inputs, key=False, has_aux=False)
    return to_program(traced, loss.__name__), mesh


class Draft:
    """A program under construction, by hand."""

    def __init__(self, axes: Mapping[str, int] | None = None, *, rank: int = 0):
        self.mesh = Mesh({"shard": 2} if axes is None else dict(axes), rank=rank)
        self.leaves: list[Leaf] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []

    def value(
        self,
        shape: tuple[int, ...],
        role: str = "activation",
        *,
        of: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        """A value with storage of its own, or of another value."""
        spec = ShapeDtype(shape, dtype)
        fresh = len(self.values)
        owner, nbytes = (fresh, spec.nbytes) if of is None else (of, 0)
        self.values.append(Value(f"v{fresh}", spec, owner, nbytes, role))
        return fresh

    def leaf(self, path: str, shape: tuple[int, ...], *, whole: bool = False) -> int:
        """A parameter leaf cut over the last axis; the index in the leaf table."""
        (row,) = layouts_of(Flat(list(self.mesh.axes)[-1]), 0, [shape], [path], self.mesh)
        full = self.value(shape, "leaf")
        spec = ShapeDtype(shape, torch.float32)
        rows = LeafLayouts(row.params, row.grads, row.opt)
        self.leaves.append(
            Leaf(path, spec, rows, full, True, True, whole, Dtypes.plain(spec.dtype))
        )
        return len(self.leaves) - 1

    def copy(self, leaf: int) -> int:
        """A value for a gathered copy of a leaf."""
        return self.value(self.leaves[leaf].spec.shape, "copy")

    def compute(self, target: Any, *args: Any, out: int, phase: str = "forward") -> int:
        """Adds a compute op; integers among `args` are values."""
        self.ops.append(Compute(target, _ref(args), (), (out,), False, phase))
        return out

    def program(self, micro: Micro, *, mode: str = "step", limit: int | None = None) -> Program:
        """The program so far."""
        tables = tuple(self.leaves), tuple(self.values), tuple(self.ops)
        return Program("drafted", mode, *tables, {}, {}, (micro,), limit)


def _ref(args: Any) -> Any:
    if isinstance(args, bool) or not isinstance(args, int | tuple | list):
        return args
    return Ref(args) if isinstance(args, int) else type(args)(_ref(arg) for arg in args)


def draft_step(*, limit: int | None = None) -> Program:
    """A correct step by hand: leaf w is kept from forward to backward, leaf b gathered again.

    Values 3, 4, 5 are the copies, 8 the loss, 9 and 10 the gradients, 13 a copy that nobody uses.
    On 2 ranks w (60 bytes) is cut in 8 and 7 elements, b (20 bytes) in 3 and 2. Ops and live bytes:

        0 gather w   60 + 32 staged     6 free b              80    12 free w, b            160
        1 wait       92                 7 sum                 60    13 reduce    80 + 44 received
        2 gather b   60 + 20 + 12       8 gradient of w      120    14 wait                 124
        3 mm         92                 9 gather b again     152    15 free gradients        80
        4 wait       92                10 wait               152    16 status                 0
        5 add        80                11 gradient of b      160    17 update                 0
    """
    d = Draft()
    w, b = d.leaf("params['w']", (3, 5)), d.leaf("params['b']", (5,))
    x = d.value((2, 3), "input")
    kept, first, second = d.copy(w), d.copy(b), d.copy(b)
    d.ops += [Gather("shard", (w,), (kept,), 0), Wait(0), Gather("shard", (b,), (first,), 1)]
    h = d.compute(aten.mm.default, x, kept, out=d.value((2, 5)))
    d.ops.append(Wait(1))
    y = d.compute(aten.add.Tensor, h, first, out=d.value((2, 5)))
    d.ops.append(Free((first,)))
    loss = d.compute(aten.sum.default, y, out=d.value(()))
    grads = d.value((3, 5), "grad"), d.value((5,), "grad")
    d.compute(aten.mul.Tensor, kept, loss, out=grads[0], phase="backward")
    d.ops += [Gather("shard", (b,), (second,), 2), Wait(2)]
    d.compute(aten.mul.Tensor, second, loss, out=grads[1], phase="backward")
    d.ops.append(Free((kept, second)))
    sums = d.value((8,), "shard"), d.value((3,), "shard")
    d.copy(b)
    d.ops += [
        Reduce("shard", (w, b), grads, sums, True, 3, 44),
        Wait(3),
        Free(grads),
        Status((loss,), (), sums),
        Update((w, b), sums),
    ]
    return d.program(Micro((x,), None, loss, None, grads, ()), limit=limit)


@dataclasses.dataclass(slots=True)
class Run:
    """What `interpret` saw: the values that are left, and per op the bytes of chosen storages."""

    env: dict[int, Tensor]
    held_bytes: list[int]


def interpret(program: Program, given: Mapping[int, Tensor], roles: Sequence[str]) -> Run:
    """Runs the compute ops on real tensors and measures the storages of some roles at each op.

    A value is dropped after the last op that reads it, as an executor does; outputs stay.
    """
    env = dict(given)
    last: dict[int, int] = {}
    for at, op in enumerate(program.ops):
        last |= dict.fromkeys((*reads(op), *writes(op)), at)
    for micro in program.micros:
        ends = (micro.loss, micro.weight, *micro.aux, *micro.grads)
        last |= {value: len(program.ops) for value in ends if value is not None}
    held: list[int] = []
    for at, op in enumerate(program.ops):
        assert isinstance(op, Compute)
        args, kwargs = (_filled(part, env) for part in (op.args, dict(op.kwargs)))
        made = op.target(*args, **kwargs)
        results = made if op.packed else (made,)
        env |= {out: t for out, t in zip(op.outs, results, strict=True) if out is not None}
        del made, results, args, kwargs
        counted = [v for v in env if program.values[program.values[v].owner].role in roles]
        storages = {env[v].untyped_storage().data_ptr(): env[v].untyped_storage() for v in counted}
        held.append(sum(storage.nbytes() for storage in storages.values()))
        for value in [v for v in env if last.get(v) == at and v not in given]:
            del env[value]
    return Run(env, held)


def _filled(args: Any, env: Mapping[int, Tensor]) -> Any:
    if isinstance(args, Ref):
        return env[args.id]
    if isinstance(args, tuple | list):
        return type(args)(_filled(arg, env) for arg in args)
    if isinstance(args, dict):
        return {key: _filled(value, env) for key, value in args.items()}
    return args
