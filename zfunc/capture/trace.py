"""Trace: a function becomes one graph of torch operators, on fake tensors.

The loss is traced together with its derivative: `make_fx` over `torch.func.vjp`, or, for the closed
list of functions that functorch refuses, and for those that look at a value unless they see that
they are traced, over `torch.autograd.grad` on copies of the leaves. The two graphs hold the same
operators but for detach nodes. `torch.func` is traced, never run: run, it would keep a second-order
graph alive and double the peak of memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc import tree
from zfunc.capture import compat, refusals
from zfunc.capture.generators import Draws, without_moving
from zfunc.capture.outputs import split_loss
from zfunc.capture.slots import ArgLeaf, Argument, Input, LeafSlot, Static
from zfunc.policy import Policy
from zfunc.scope import Scope, entered, scope
from zfunc.sharded import Sharded

__all__ = ["Traced", "lookup_full", "trace_forward", "trace_loss"]


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A graph and what its placeholders and outputs are.

    Attributes:
        graph: the traced module; None once it has become a program.
        slots: the slot of each placeholder; a `Sharded` argument has two (piece, then whole); for
            other tensors their path.
        num_forward: how many nodes precede the derivative.
        has_loss: whether the first output is a loss.
        weighted: whether the loss returned a weight.
        grads: per trainable leaf, whether the graph has its gradient.
        aux: structure of what the function returns besides.
        statics: the leaves of what it returns besides, None where a tensor goes.
        derivation: "vjp", "autograd" or "forward".
        lines: the user's line of each node, by its number; empty unless asked for.
        policies: remat region -> what it keeps.
    """

    graph: torch.fx.GraphModule | None
    slots: tuple[tuple[str, Any], ...]
    num_forward: int
    has_loss: bool
    weighted: bool
    grads: tuple[bool, ...]
    aux: Any
    statics: tuple[Any, ...]
    derivation: str
    lines: Mapping[int, str]
    policies: Mapping[str, Policy]


def lookup_full(leaf: Sharded) -> Tensor | None:
    """The whole of a `Sharded` argument during capture; None if it is not an argument as given."""
    current = scope()
    return None if current is None else current.fulls.get(id(leaf.local))


def trace_loss(
    loss_fn: Callable[..., Any],
    params: Argument,
    batch: Argument,
    *,
    key: bool,
    has_aux: bool,
    scaled: bool = False,
    derive: bool = True,
    lines: bool = False,
) -> Traced:
    """Traces a loss and its gradient.

    Args:
        loss_fn: `loss_fn(params, batch)`, or with a keyword argument `key`.
        params: the parameters' description.
        batch: the batch's description.
        key: whether the loss takes a key.
        has_aux: whether it returns `(loss, aux)`.
        scaled: whether the derivative starts from a scale, an input after those of the batch.
        derive: whether to trace the gradient as well.
        lines: whether to note the line of every node, which takes long.

    Returns:
        The graph; its outputs are loss, weight if any, gradients, tensors of aux.

    Raises:
        CaptureError: the loss cannot be turned into a graph that stays true.
    """
    trainable = [i for i, s in enumerate(params.slots) if isinstance(s, LeafSlot) and s.trainable]
    box: dict[str, Any] = {}

    def loss_of(diff: Sequence[Tensor], leaves: list[Any], inputs: Any, secret: Any) -> Any:
        leaves = list(leaves)
        for index, tensor in zip(trainable, diff, strict=True):
            leaves[index] = tensor
        arguments = tree.unflatten(params.structure, leaves), inputs
        out = loss_fn(*arguments, key=secret) if key else loss_fn(*arguments)
        loss, weight, aux = split_loss(out, has_aux)
        box["weighted"] = weight is not None
        weights = () if weight is None else (weight,)
        return loss, weights + _split_aux(aux, box)

    def start_of(loss: Tensor, scale: Tensor | None) -> Tensor:
        return torch.ones_like(loss) if scale is None else scale.to(loss.dtype)

    def with_vjp(
        diff: Sequence[Tensor], scale: Tensor | None, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        made: Any = torch.func.vjp(lambda *diff: loss_of(diff, *rest), *diff, has_aux=True)
        loss, pull, extra = made
        box["num_forward"] = compat.num_nodes()
        return (loss, *extra, *pull(start_of(loss, scale)))

    def without_derivative(diff: Any, _: Any, *rest: Any) -> tuple[Tensor | None, ...]:
        loss, extra = loss_of(diff, *rest)
        box["num_forward"] = compat.num_nodes()
        return (loss, *extra)

    def with_autograd(
        diff: Sequence[Tensor], scale: Tensor | None, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        copies = [tensor.detach().requires_grad_() for tensor in diff]
        with torch.enable_grad():
            loss, extra = loss_of(copies, *rest)
        box["num_forward"] = compat.num_nodes()
        grads: Sequence[Tensor | None] = [None] * len(copies)
        if loss.requires_grad:
            start = start_of(loss, scale)
            grads = torch.autograd.grad(loss, copies, start, allow_unused=True)
        return (loss.detach(), *(tensor.detach() for tensor in extra), *grads)

    def run(derive: Callable[..., Any], derivation: str) -> Traced:
        def body(leaves: list[Any], inputs: Any, scale: Any, secret: Any) -> tuple[Tensor, ...]:
            box.clear()
            outs = derive([leaves[i] for i in trainable], scale, leaves, inputs, secret)
            box["present"] = [out is not None for out in outs]
            return tuple(out for out in outs if out is not None)

        grads = 0 if derivation == "forward" else len(trainable)
        extras = _Extras(scaled, key)
        return _trace(body, params, batch, extras, box, grads, derivation, lines=lines)

    if not trainable or not derive:
        return run(without_derivative, "forward")
    try:
        return run(with_vjp, "vjp")
    except Exception as refusal:
        # Libraries that ask whether they are traced see it in fake tensors, not in functorch's.
        looks = isinstance(refusal.__cause__, compat.DATA_DEPENDENT)
        if not (looks or compat.is_functorch_refusal(refusal)):
            raise
    return run(with_autograd, "autograd")


def trace_forward(
    fn: Callable[..., Any],
    params: Argument,
    args: Argument,
    *,
    pure: bool = True,
    lines: bool = False,
) -> Traced:
    """Traces a function of parameters and further arguments without its derivative.

    Args:
        fn: `fn(params, *args)`.
        params: the parameters' description.
        args: the description of the tuple of further arguments.
        pure: whether to refuse a function that moves a generator while it is traced; False for
            one that is run once, right after.
        lines: whether to note the line of every node, which takes long.

    Returns:
        The graph; its outputs are the tensors of what the function returns.

    Raises:
        CaptureError: the function cannot be turned into a graph that stays true.
    """
    box: dict[str, Any] = {"present": []}

    def body(leaves: list[Any], inputs: Any, *_: Any) -> tuple[Tensor, ...]:
        out = fn(tree.unflatten(params.structure, leaves), *inputs)
        tensors = _split_aux(out, box)
        box["num_forward"] = compat.num_nodes()
        return tensors

    with torch.no_grad():
        extras = _Extras(False, False)
        return _trace(body, params, args, extras, box, 0, "forward", pure=pure, lines=lines)


class _Extras(NamedTuple):
    """Which inputs a function has besides its arguments."""

    scale: bool
    key: bool


def _trace(
    body: Callable[[list[Any], Any, Any, Any], tuple[Tensor, ...]],
    params: Argument,
    args: Argument,
    extras: _Extras,
    box: dict[str, Any],
    num_grads: int,
    derivation: str,
    *,
    pure: bool = True,
    lines: bool = False,
) -> Traced:
    """Runs `body` on fake tensors for every slot and records the graph."""
    found: dict[int, str] = {}
    policies: dict[str, Policy] = {}

    def flat(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        noting = compat.Lines(found, refusals.line_of_stack) if lines else contextlib.nullcontext()
        policies.clear()
        with entered(Scope({}, compat.annotate, policies)) as current, noting:
            remaining = iter(tensors)
            leaves = [_fill(slot, remaining, current) for slot in params.slots]
            inputs = [_fill(slot, remaining, current) for slot in args.slots]
            scale, secret = (next(remaining) if has else None for has in extras)
            return body(leaves, tree.unflatten(args.structure, inputs), scale, secret)

    def record(on_draw: Draws | None) -> tuple[torch.fx.GraphModule, list[tuple[str, Any]]]:
        with compat.fake_mode():
            fakes, slots = _placeholders(params, args, extras)
            return compat.to_graph(flat, fakes, on_draw=on_draw), slots

    def recorded_once() -> tuple[torch.fx.GraphModule, list[tuple[str, Any]]]:
        with Draws(own=True) as draws:
            made = record(draws)
        draws.check()
        return made

    with refusals.explained():
        graph, slots = without_moving(record) if pure else recorded_once()
    num_first = len(box["present"]) - num_grads
    return Traced(
        graph,
        tuple(slots),
        box["num_forward"],
        "weighted" in box,
        box.get("weighted", False),
        tuple(box["present"][num_first:]) if num_grads else (),
        box["aux"],
        box["statics"],
        derivation,
        found,
        policies,
    )


def _placeholders(
    params: Argument, args: Argument, extras: _Extras
) -> tuple[tuple[Tensor, ...], list[tuple[str, Any]]]:
    """Fake tensors for every slot, and what each of them is."""
    fakes: list[Tensor] = []
    slots: list[tuple[str, Any]] = []
    paths = [accessor.codify("batch") for accessor in args.structure.accessors()]
    paths = [""] * len(params.slots) + paths
    for slot, path in zip((*params.slots, *args.slots), paths, strict=True):
        if isinstance(slot, LeafSlot):
            fakes.append(_empty(slot.spec.shape, slot.spec.dtype, slot.layouts.params.mesh.device))
            slots.append(("leaf", slot))
        elif isinstance(slot, ArgLeaf):
            device = slot.layouts.params.mesh.device
            fakes.append(_empty(slot.local_shape, slot.spec.dtype, device))
            slots.append(("piece", slot))
            fakes.append(_empty(slot.spec.shape, slot.spec.dtype, device))
            slots.append(("leaf", slot))
        elif isinstance(slot, Input):
            fakes.append(
                torch.empty_strided(
                    slot.spec.shape, slot.stride, dtype=slot.spec.dtype, device=slot.device
                )
            )
            slots.append(("input", path))
    if extras.scale:
        fakes.append(torch.empty((), dtype=torch.float64))
        slots.append(("input", "loss_scale"))
    if extras.key:
        fakes.append(torch.empty(2, dtype=torch.int64))
        slots.append(("key", None))
    return tuple(fakes), slots


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _fill(slot: Any, tensors: Iterator[Tensor], current: Scope) -> Any:
    """What the user's function sees for a slot."""
    if isinstance(slot, Static):
        return slot.value
    tensor = next(tensors)
    if isinstance(slot, ArgLeaf):
        current.fulls[id(tensor)] = next(tensors)
        return Sharded(tensor, slot.layouts.params)
    return tensor


def _split_aux(aux: Any, box: dict[str, Any]) -> tuple[Tensor, ...]:
    """Takes the tensors out of a tree; structure and other leaves are kept aside."""
    leaves, box["aux"] = tree.flatten(aux)
    box["statics"] = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
