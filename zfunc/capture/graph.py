"""Graph -> Program: the traced nodes become compute ops over values, checked for side effects.

Aliases are exact: every node's fake tensor knows its storage, so a view names the value whose
storage it uses, and an op that writes into a leaf or an input is refused. Detach and alias nodes
vanish: at run time there is no autograd.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from zfunc.capture import compat
from zfunc.capture.slots import LeafSlot
from zfunc.capture.trace import Traced
from zfunc.errors import CaptureError, explain
from zfunc.layout import Dtypes, ShapeDtype
from zfunc.program.ir import (
    Collective,
    Compute,
    Leaf,
    Micro,
    Op,
    Program,
    Ref,
    Value,
    draws,
    mutates,
    reads,
    writes,
)

__all__ = ["capture", "leaf_of", "to_program"]

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_ZEROS = (torch.ops.aten.zeros_like.default, torch.ops.aten.zeros.default)


@dataclasses.dataclass(slots=True)
class _Builder:
    """The program under construction."""

    name: str
    values: list[Value] = dataclasses.field(default_factory=list)
    ops: list[Op] = dataclasses.field(default_factory=list)
    constants: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    storages: dict[int, int] = dataclasses.field(default_factory=dict)
    ids: dict[torch.fx.Node, int] = dataclasses.field(default_factory=dict)
    zeros: set[int] = dataclasses.field(default_factory=set)
    fakes: list[torch.Tensor] = dataclasses.field(default_factory=list)
    generators: dict[torch.fx.Node, torch.Generator] = dataclasses.field(default_factory=dict)
    at: str = ""
    derives: bool = False

    def own(self, source: int, phase: str, *, dense: bool) -> int:
        """A value that an output may be: alias of no argument, and if `dense`, of nothing."""
        fake, owner = self.fakes[source], self.values[self.values[source].owner]
        borrowed = owner.role in ("leaf", "input", "constant")
        loose = not fake.is_contiguous() or owner.nbytes != self.values[source].spec.nbytes
        if not borrowed and not (dense and loose):
            return source
        return self.copy(source, phase)

    def copy(self, source: int, phase: str) -> int:
        """A contiguous copy of a value."""
        fake = self.fakes[source]
        copy = fake.new_empty(fake.shape)
        out = self.value(copy, f"{self.values[source].name}.own", "activation")
        clone = torch.ops.aten.clone.default
        layout = (("memory_format", torch.contiguous_format),)
        self.ops.append(Compute(clone, (Ref(source),), layout, (out,), False, phase))
        return out

    def label(self, value: int, labels: tuple[str, ...]) -> None:
        """Gives a value further names."""
        old = self.values[value]
        self.values[value] = dataclasses.replace(old, labels=old.labels + labels)

    def value(self, fake: Any, name: str, role: str) -> int:
        """Adds a value for a fake tensor; the first to use a storage owns it."""
        if not isinstance(fake, torch.Tensor) or any(not isinstance(n, int) for n in fake.shape):
            raise CaptureError(
                explain(
                    f"{self.name} makes a value that Python must look into ({name}){self.at}",
                    expected="tensors of fixed shapes",
                    got=type(fake),
                    do="replace .item(), nonzero and boolean indexing by torch.where or masks",
                ),
                runs_dynamic=True,
            )
        if fake.layout != torch.strided:
            raise CaptureError(
                explain(
                    f"{self.name} makes a sparse tensor ({name}){self.at}",
                    expected="strided tensors",
                    got=fake.layout,
                    do="leave out sparse=True: gradients are reduced dense",
                ),
                runs_dynamic=True,
            )
        storage = fake.untyped_storage()
        fresh = len(self.values)
        owner = self.storages.setdefault(storage._cdata, fresh)
        spec = ShapeDtype(tuple(fake.shape), fake.dtype)
        owned = owner == fresh
        role = role if owned else self.values[owner].role
        self.values.append(Value(name, spec, owner, storage.nbytes() if owned else 0, role))
        self.fakes.append(fake)
        return fresh


def to_program(traced: Traced, name: str) -> Program:
    """Turns a traced graph into a Program of compute ops with one micro-batch.

    Args:
        traced: the graph and the meaning of its placeholders and outputs.
        name: the name of the user's function.

    Returns:
        The program, in mode "grad" for a loss and "forward" otherwise. The inputs of its
        micro-batch are the argument's tensors (pieces of `Sharded` leaves among them), in order.

    Raises:
        CaptureError: the function writes into its arguments, or needs a tensor's value in Python.
    """
    build = _Builder(name, derives=any(traced.grads))
    leaves: list[Leaf] = []
    inputs: list[int] = []
    key: int | None = None
    assert traced.graph is not None
    nodes = list(traced.graph.graph.nodes)
    for position, node in enumerate(nodes):
        build.at = f" at {traced.lines[position]}" if position in traced.lines else ""
        if node.op == "placeholder":
            kind, slot = traced.slots[position]
            role = "leaf" if kind == "leaf" else "input"
            build.ids[node] = build.value(node.meta["val"], _placeholder(kind, slot), role)
            if kind == "leaf":
                leaves.append(leaf_of(slot, build.ids[node]))
            elif kind == "key":
                key = build.ids[node]
            else:
                inputs.append(build.ids[node])
        elif node.op == "get_attr":
            constant: Any = getattr(traced.graph, node.target)
            if isinstance(constant, torch.Generator):
                build.generators[node] = constant
                continue
            if compat.is_fake(constant):
                raise _untracked(build, node)
            build.ids[node] = build.value(node.meta["val"], node.name, "constant")
            build.constants[build.ids[node]] = constant
        elif node.op == "call_function":
            phase = "forward" if position < traced.num_forward else "backward"
            _add_call(build, node, phase)
    outputs = _outputs(build, nodes[-1])
    micro = _micro(build, traced, outputs, tuple(inputs), key, leaves)
    keep = tuple(
        out for out in (micro.loss, micro.weight, *micro.grads, *micro.aux) if out is not None
    )
    return Program(
        name,
        "grad" if traced.has_loss else "forward",
        tuple(leaves),
        tuple(build.values),
        tuple(_live_ops(build, keep)),
        {},
        build.constants,
        (micro,),
        policies=traced.policies,
    )


def _untracked(build: _Builder, node: torch.fx.Node) -> CaptureError:
    """A tensor whose making the trace has not seen: it has a shape and no values."""
    return CaptureError(
        explain(
            f"{build.name} returns a tensor that cannot be followed to its arguments ({node.name})"
            f"{build.at}",
            expected="a gradient or result that operators make",
            got="what an autograd.Function saved, handed back as it is",
            do="make a new tensor in backward, such as saved * grad",
        ),
        runs_dynamic=True,
    )


def capture(trace: Callable[..., Traced], name: str) -> tuple[Traced, Program]:
    """Traces a function into a Program; if that is refused, once more to name the user's line.

    Args:
        trace: traces it; takes `lines` and `derive` as `trace_loss` does.
        name: the name of the user's function.

    Returns:
        The trace and the program.

    Raises:
        CaptureError: see `to_program`.
    """
    try:
        traced = trace()
    except RuntimeError as error:
        if compat.is_leaf_write(error):
            to_program(trace(lines=True, derive=False), name)
        raise
    try:
        return traced, to_program(traced, name)
    except CaptureError as refusal:
        again = trace(lines=True)
        to_program(again, name)
        raise refusal


def _placeholder(kind: str, slot: Any) -> str:
    if isinstance(slot, LeafSlot):
        return slot.path
    return "key" if kind == "key" else slot if kind == "input" else f"{slot.path}.{kind}"


def leaf_of(slot: Any, full: int) -> Leaf:
    """The leaf-table entry of a slot that arrives whole."""
    resident = slot.layouts.params.is_whole
    is_param = isinstance(slot, LeafSlot)
    trainable = is_param and slot.trainable
    dtypes = slot.dtypes if is_param else Dtypes.plain(slot.spec.dtype)
    return Leaf(slot.path, slot.spec, slot.layouts, full, trainable, is_param, resident, dtypes)


def _add_call(build: _Builder, node: torch.fx.Node, phase: str) -> None:
    """Adds one node's op and the values that it makes."""
    node.target = compat.declared(node.target, node.args)
    fake = node.meta.get("val")
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, torch.fx.Node) and isinstance(index, int)
        build.ids[node] = source.meta["zfunc_outs"][index]
        return
    if node.target in _ALIASES:
        build.ids[node] = build.ids[node.args[0]]  # pyright: ignore
        build.label(build.ids[node], compat.names_of(node))
        return
    packed = isinstance(fake, tuple | list)
    outs = tuple(
        None
        if item is None
        else build.value(item, f"{node.name}.{k}" if packed else node.name, "activation")
        for k, item in enumerate(fake if packed else [fake])
    )
    _check_call(build, node)
    if build.derives and phase == "forward":
        _check_derivative(build, node, outs)
    if packed:
        node.meta["zfunc_outs"] = outs
    elif outs[0] is not None:
        build.ids[node] = outs[0]
        if node.target in _ZEROS:
            build.zeros.add(outs[0])
    build.ops.append(_op(build, node, outs, packed, phase))


def _op(
    build: _Builder, node: torch.fx.Node, outs: tuple[int | None, ...], packed: bool, phase: str
) -> Op:
    """The op of a node: compute, or a collective that the loss asked for."""

    def name_of(arg: torch.fx.Node) -> Any:
        return build.generators.get(arg) or Ref(build.ids[arg])

    args: Any = torch.fx.map_arg(node.args, name_of)  # pyright: ignore
    kwargs: Any = torch.fx.map_arg(node.kwargs, name_of)  # pyright: ignore
    name = getattr(node.target, "__name__", str(node.target))
    if getattr(node.target, "namespace", "") == "zfunc":
        source, axis, *rest = _plain(args)
        shape = tuple(rest[0]) if name.startswith("gather") else ()
        assert outs[0] is not None
        regions = compat.regions_of(node)
        return Collective(name.split(".")[0], axis, source.id, outs[0], shape, regions=regions)
    return Compute(
        node.target,  # pyright: ignore
        _plain(args),
        tuple((key, _plain(value)) for key, value in kwargs.items()),
        outs,
        packed,
        phase,
        compat.regions_of(node),
    )


def _plain(args: Any) -> Any:
    """Argument structures without torch.fx's own list and dict types."""
    if isinstance(args, tuple):
        return tuple(_plain(item) for item in args)
    if isinstance(args, list):
        return [_plain(item) for item in args]
    if isinstance(args, dict):
        return {key: _plain(value) for key, value in args.items()}
    return args


def _check_call(build: _Builder, node: torch.fx.Node) -> None:
    """Refuses writes into arguments."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    for position, argument in enumerate(schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        for target in given if isinstance(given, list | tuple) else [given]:
            if isinstance(target, torch.fx.Node):
                _check_write(build, target, node)


def _check_derivative(build: _Builder, node: torch.fx.Node, outs: tuple[int | None, ...]) -> None:
    """Refuses operators, not torch's own, that would cut the gradient without a word."""
    floats = any(out is not None and build.fakes[out].is_floating_point() for out in outs)
    known = getattr(node.target, "namespace", "aten") in ("aten", "prims", "zfunc")
    if floats and not known and not compat.has_derivative(node.target):
        raise CaptureError(
            explain(
                f"{node.target} has no derivative{build.at}",
                expected="an operator that autograd has a rule for",
                do="register one with torch.library.register_autograd",
            ),
            runs_dynamic=True,
        )


def _check_write(build: _Builder, target: torch.fx.Node, node: torch.fx.Node) -> None:
    owner = build.values[build.values[build.ids[target]].owner]
    if owner.role in ("leaf", "input"):
        raise CaptureError(
            explain(
                f"{build.name} writes into its argument {owner.name} in place ({node.target})"
                f"{build.at}",
                expected="a function without side effects",
                do="clone before writing, or return the new value (has_aux=True)",
            )
        )


def _outputs(build: _Builder, node: torch.fx.Node) -> list[int]:
    """The values of the graph's outputs."""
    (outputs,) = node.args
    return [build.ids[out] for out in outputs]  # pyright: ignore


def _micro(
    build: _Builder,
    traced: Traced,
    outputs: list[int],
    inputs: tuple[int, ...],
    key: int | None,
    leaves: list[Leaf],
) -> Micro:
    """Names the outputs: loss, weight, aux, gradients."""
    remaining = iter(outputs)
    written = {build.values[value].owner for op in build.ops for value in mutates(op)}
    zeros = {value for value in build.zeros if build.values[value].owner not in written}
    loss = weight = None
    if traced.has_loss:
        loss = build.own(next(remaining), "forward", dense=False)
        weight = build.own(next(remaining), "forward", dense=False) if traced.weighted else None
    aux = [build.own(next(remaining), "backward", dense=False) for s in traced.statics if s is None]
    present = iter(traced.grads)
    grads: list[int | None] = []
    owners = {build.values[out].owner for out in (loss, weight, *aux) if out is not None}
    for leaf in leaves:
        grad = next(remaining) if leaf.trainable and next(present, False) else None
        if grad is None or grad in zeros:
            grads.append(None)
            continue
        grad = build.own(grad, "backward", dense=True)
        if build.values[grad].owner in owners:
            grad = build.copy(grad, "backward")
        owners.add(build.values[grad].owner)
        grads.append(grad)
    return Micro(inputs, key, loss, weight, tuple(grads), tuple(aux))


def _live_ops(build: _Builder, outputs: tuple[int, ...]) -> list[Op]:
    """Drops ops whose results nobody reads.

    A write into a storage that is read later stays, and so does a draw: later ones depend on it.
    """
    owner = [value.owner for value in build.values]
    needed = set(outputs)
    owners = {owner[value] for value in outputs}
    kept: list[Op] = []
    for op in reversed(build.ops):
        changes = any(owner[value] in owners for value in mutates(op))
        if changes or isinstance(op, Collective) or draws(op) or needed & set(writes(op)):
            kept.append(op)
            needed.update(reads(op))
            owners.update(owner[value] for value in reads(op))
    return kept[::-1]
