"""The Program: one step as a flat list of ops over values, all of it frozen data.

A value is a tensor that exists for a while during a step; an op is a frozen dataclass. Passes map a
Program to a Program, the executor has one method per op, the printer one line per op. Between
capture and `pack`, compute ops read leaves through *virtual* full values (`Leaf.full`, and what is
derived from leaves alone, `Program.derived`); `pack` replaces each of them by real copies with a
beginning (gather or derivation) and an end (free).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zfunc.layout import Dtypes, LeafLayouts, ShapeDtype
from zfunc.policy import Policy

__all__ = [
    "Accumulate",
    "Call",
    "Collective",
    "Compute",
    "Free",
    "Gather",
    "Leaf",
    "Micro",
    "Op",
    "Program",
    "Reduce",
    "Ref",
    "Rng",
    "Status",
    "Update",
    "Value",
    "Wait",
    "draws",
    "is_draw",
    "map_refs",
    "mutates",
    "reads",
    "refs",
    "writes",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value inside the arguments of a compute op."""

    id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program.

    Attributes:
        name: what the printer calls it.
        spec: shape and dtype.
        owner: the value whose storage it uses; its own id when it owns one.
        nbytes: bytes of the storage if it owns one, else 0.
        role: what the bytes are for: "input", "leaf" (virtual full), "copy" (gathered),
            "derived" (from leaves alone), "activation", "grad" (full), "shard" (reduced gradient),
            "constant".
        labels: the names that the user gave it.
    """

    name: str
    spec: ShapeDtype
    owner: int
    nbytes: int
    role: str
    labels: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf that the program reads: of the parameters, or a `Sharded` argument.

    Attributes:
        path: where the user finds it.
        spec: shape and dtype of the whole leaf as ops read it.
        layouts: of the parameter, its gradient and its optimizer state.
        full: the virtual value that compute ops read.
        trainable: whether it has a gradient.
        is_param: whether it is a parameter, not a `Sharded` argument.
        resident: whether this rank holds it whole anyway, so that no gather is needed.
        dtypes: in which its pieces are stored, and its gradients reduced.
    """

    path: str
    spec: ShapeDtype
    layouts: LeafLayouts
    full: int
    trainable: bool
    is_param: bool
    resident: bool
    dtypes: Dtypes

    @property
    def is_cast(self) -> bool:
        """Whether its pieces are cast before they are gathered."""
        return self.spec.dtype != self.dtypes.stored

    @property
    def reduced_dtype(self) -> torch.dtype:
        """The dtype of its reduced gradient."""
        return self.dtypes.reduce or self.spec.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Micro:
    """The inputs and outputs of one micro-batch.

    Attributes:
        inputs: values of the batch's tensors, in canonical order.
        key: the value of the folded key, or None.
        loss: the loss (or the sum of a weighted loss).
        weight: the weight of a weighted loss, or None.
        grads: per leaf the full gradient, or None where it is zero or not wanted.
        aux: values of the tensors that the loss returns besides.
    """

    inputs: tuple[int, ...]
    key: int | None
    loss: int | None
    weight: int | None
    grads: tuple[int | None, ...]
    aux: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """Calls a torch operator.

    Attributes:
        target: the operator.
        args: positional arguments, with `Ref` for values.
        kwargs: keyword arguments as pairs.
        outs: the results; None for one that nobody reads.
        packed: whether the operator returns a tuple or list.
        phase: "forward", "backward", "recompute" or "derive".
        regions: the `remat` regions it was captured in, outermost first.
        micro: the micro-batch.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[int | None, ...]
    packed: bool
    phase: str
    regions: tuple[str, ...] = ()
    micro: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Issues the gather of a bucket of leaves into new full copies; complete after its `Wait`."""

    axis: str
    leaves: tuple[int, ...]
    outs: tuple[int, ...]
    token: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reduce:
    """Issues a sum of gradients over one axis; complete after its `Wait`.

    Attributes:
        axis: the axis summed over.
        leaves: whose gradients.
        ins: the summands of this rank.
        outs: the sums: this rank's piece (`scatter`), or whole.
        scatter: whether each rank keeps its piece only.
        token: pairs it with its `Wait`.
        receive_bytes: buffers for what peers send, alive until the wait.
    """

    axis: str
    leaves: tuple[int, ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    scatter: bool
    token: int
    receive_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Awaits a gather or reduce."""

    token: int


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Drops copies, derived values or gradients."""

    values: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Accumulate:
    """Adds each of `ins` into `into`, in place."""

    into: tuple[int, ...]
    ins: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A gather or scatter of a computed value that the loss asks for; blocks.

    Attributes:
        name: "gather" (pieces to whole) or "sum" (whole to the piece of the sum).
        axis: the axis of the mesh.
        source: the value given.
        out: the value made.
        shape: for "gather" the shape of the whole result.
        micro: the micro-batch.
        regions: the `remat` regions it was captured in, outermost first.
    """

    name: str
    axis: str
    source: int
    out: int
    shape: tuple[int, ...]
    micro: int = 0
    regions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Runs the user's function as it is, with its derivative (the dynamic rung).

    Attributes:
        leaves: the whole leaves that it is called with.
        loss: the loss (the sum of a weighted one); None for a function without.
        weight: its weight, 1 for a loss without; None for a function without.
        grads: the gradient of every trainable leaf.
        micro: the micro-batch.
    """

    leaves: tuple[int, ...]
    loss: int | None
    weight: int | None
    grads: tuple[int, ...]
    micro: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Rng:
    """Keeps or sets the generator's state, so that recomputation draws the same numbers.

    Attributes:
        action: "record", "replay" or "restore".
        slot: which recorded state.
    """

    action: str
    slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """The commit point: sums error flag, non-finite flag, losses and squares over all ranks.

    Attributes:
        losses: one per micro-batch.
        weights: one per micro-batch, or empty.
        grads: the reduced gradients, one per trainable leaf; None where it is zero.
    """

    losses: tuple[int, ...]
    weights: tuple[int, ...]
    grads: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """Runs the optimizer on this rank's pieces and writes parameters and optimizer state.

    Attributes:
        leaves: every trainable leaf, in canonical order.
        grads: its reduced gradient; None where it is zero.
    """

    leaves: tuple[int, ...]
    grads: tuple[int | None, ...]


Op = (
    Compute | Gather | Reduce | Wait | Free | Accumulate | Collective | Call | Rng | Status | Update
)


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A step, a gradient or a forward as data.

    Attributes:
        name: the name of the user's function.
        mode: "step", "grad" or "forward".
        leaves: what is gathered or resident; parameters first.
        values: all values; an id is an index.
        ops: in the order of execution.
        derived: virtual value -> the op that derives it from leaves and other derived values.
        constants: value -> the tensor that the function created from Python data.
        micros: inputs and outputs per micro-batch.
        limit_bytes: the budget of live bytes that `pack` settled on; None before it.
        policies: `remat` region -> what it keeps; nothing if it is not there.
    """

    name: str
    mode: str
    leaves: tuple[Leaf, ...]
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    derived: Mapping[int, Compute]
    constants: Mapping[int, torch.Tensor]
    micros: tuple[Micro, ...]
    limit_bytes: int | None = None
    policies: Mapping[str, Policy] = dataclasses.field(default_factory=dict)


def refs(args: Any) -> Iterator[int]:
    """The values that an argument structure of a compute op refers to."""
    if isinstance(args, Ref):
        yield args.id
    elif isinstance(args, (tuple, list)):
        for item in args:
            yield from refs(item)
    elif isinstance(args, dict):
        for item in args.values():
            yield from refs(item)


def map_refs(args: Any, rename: Callable[[int], int]) -> Any:
    """The same argument structure with every value renamed."""
    if isinstance(args, Ref):
        return Ref(rename(args.id))
    if isinstance(args, tuple):
        return tuple(map_refs(item, rename) for item in args)
    if isinstance(args, list):
        return [map_refs(item, rename) for item in args]
    if isinstance(args, dict):
        return {key: map_refs(item, rename) for key, item in args.items()}
    return args


def reads(op: Op) -> tuple[int, ...]:
    """The values that an op reads."""
    if isinstance(op, Compute):
        return tuple(refs(op.args)) + tuple(refs(op.kwargs))
    if isinstance(op, Reduce):
        return op.ins
    if isinstance(op, Accumulate):
        return op.into + op.ins
    if isinstance(op, Collective):
        return (op.source,)
    if isinstance(op, Call):
        return op.leaves
    if isinstance(op, Status):
        return op.losses + op.weights + tuple(g for g in op.grads if g is not None)
    if isinstance(op, Update):
        return tuple(g for g in op.grads if g is not None)
    return ()


def writes(op: Op) -> tuple[int, ...]:
    """The values that an op makes (a gather's and a reduce's are complete after the wait)."""
    if isinstance(op, Compute):
        return tuple(out for out in op.outs if out is not None)
    if isinstance(op, Gather | Reduce):
        return op.outs
    if isinstance(op, Collective):
        return (op.out,)
    if isinstance(op, Call):
        ends = () if op.loss is None or op.weight is None else (op.loss, op.weight)
        return ends + op.grads
    return ()


def mutates(op: Op) -> tuple[int, ...]:
    """The values that an op writes in place."""
    schema = getattr(op.target, "_schema", None) if isinstance(op, Compute) else None
    if schema is None or not schema.is_mutable:
        return ()
    assert isinstance(op, Compute)
    named = dict(op.kwargs)
    given = [*op.args, *(named.get(a.name) for a in schema.arguments[len(op.args) :])]
    return tuple(
        value
        for argument, arg in zip(schema.arguments, given, strict=True)
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in refs(arg)
    )


def draws(op: Op) -> bool:
    """Whether an op moves a generator."""
    return isinstance(op, Compute) and is_draw(op.target, op.args, dict(op.kwargs))


def is_draw(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator moves a generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    given = {argument.name: argument.default_value for argument in target._schema.arguments}
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    # The backward ops of attention take the seed of their forward op.
    return "philox_seed" not in given and given.get("dropout_p") != 0
