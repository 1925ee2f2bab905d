"""The dynamic rung: a function that Python must run, called as it is between gathers and reduces.

For losses whose control flow depends on values. Plain autograd differentiates it on copies of the
whole leaves; whatever it does, the collectives around it are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zfunc import tree
from zfunc.capture.compat import gradients
from zfunc.capture.outputs import split_loss
from zfunc.capture.refusals import OwnWeights, explained_calls
from zfunc.errors import CaptureError, explain
from zfunc.params import ParamTable
from zfunc.scope import Scope, entered

__all__ = ["call_forward", "call_loss"]

_READ_DATA = torch.Tensor.data.__get__  # pyright: ignore


def call_loss(
    loss_fn: Callable[..., Any],
    table: ParamTable,
    fulls: Sequence[Tensor],
    arguments: Sequence[Any],
    key: Tensor | None,
    *,
    has_aux: bool,
    scale: float = 1.0,
) -> tuple[list[Tensor], Any]:
    """Runs a loss and its gradient.

    Args:
        loss_fn: the user's loss.
        table: its parameters.
        fulls: the whole leaves.
        arguments: what it is called with besides parameters.
        key: its key, or None if it takes none.
        has_aux: whether it returns `(loss, aux)`.
        scale: of the gradients.

    Returns:
        Loss, weight (1 for a loss without) and the gradient of every trainable leaf; and aux.

    Raises:
        CaptureError: it writes into an argument.
    """
    leaves = _lent(table, fulls)
    diff = [leaves[i].requires_grad_() for i in table.trainable]
    watched = _versions(table, leaves, arguments)
    keys = {} if key is None else {"key": key}
    grads: Sequence[Tensor | None] = [None] * len(diff)
    with entered(Scope({}, None)):  # what is computed again in the backward pass runs in it too
        with torch.enable_grad(), explained_calls(), _CountedData(watched):
            out = loss_fn(table.rebuild(leaves), *arguments, **keys)
            loss, weight, aux = split_loss(out, has_aux)
        if loss.requires_grad and diff:
            with OwnWeights():
                grads = gradients(loss, diff, scale)
    _refuse_writes(watched)
    if weight is None:
        weight = torch.ones((), dtype=torch.float64)
    owned = _owned(grads, diff)
    return [loss.detach(), weight, *owned], _detached(aux, fulls)


def call_forward(
    fn: Callable[..., Any], table: ParamTable, fulls: Sequence[Tensor], arguments: Sequence[Any]
) -> tuple[list[Tensor], Any]:
    """Runs a function of whole parameters without a derivative; its result counts as aux."""
    leaves = _lent(table, fulls)
    watched = _versions(table, leaves, arguments)
    with torch.no_grad(), entered(Scope({}, None)), _CountedData(watched):
        out = fn(table.rebuild(leaves), *arguments)
    _refuse_writes(watched)
    return [], _detached(out, fulls)


class _CountedData(TorchFunctionMode):
    """Makes `.data` of an argument count its writes as the argument does; it has its own count.

    Args:
        watched: as `_versions` gives it.
    """

    def __init__(self, watched: Sequence[tuple[str, Tensor, int]]):
        super().__init__()
        dense = [x for _, x, _ in watched if x.layout == torch.strided]
        self._storages = {x.untyped_storage().data_ptr() for x in dense}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ_DATA and self._is_watched(args[0]):
            return args[0].detach()
        return func(*args, **(kwargs or {}))

    def _is_watched(self, tensor: Tensor) -> bool:
        try:
            return tensor.untyped_storage().data_ptr() in self._storages
        except NotImplementedError:  # sparse, or wrapped by torch.func
            return False


def _lent(table: ParamTable, fulls: Sequence[Tensor]) -> list[Tensor]:
    """Whole leaves that a function may ruin: what the state holds whole is copied."""
    layouts = [slot.layouts.params for slot in table.slots]
    return [
        full.detach() if layout.axis and layout.mesh.axis_size(layout.axis) > 1 else full.clone()
        for full, layout in zip(fulls, layouts, strict=True)
    ]


def _versions(
    table: ParamTable, leaves: Sequence[Tensor], arguments: Sequence[Any]
) -> list[tuple[str, Tensor, int]]:
    """Every tensor that a function must not write into: its path, itself, its version."""
    given = [(slot.path, leaf) for slot, leaf in zip(table.slots, leaves, strict=True)]
    for argument in arguments:
        found = zip(tree.leaf_paths(argument, "batch"), tree.leaves(argument), strict=True)
        given += [(path, x) for path, x in found if isinstance(x, Tensor) and not x.is_inference()]
    return [(path, x, x._version) for path, x in given]


def _refuse_writes(watched: Sequence[tuple[str, Tensor, int]]) -> None:
    for path, tensor, version in watched:
        if tensor._version != version:
            raise CaptureError(
                explain(
                    f"the function writes into its argument {path} in place",
                    expected="a function without side effects",
                    do="clone before writing, or return the new value (has_aux=True)",
                )
            )


def _owned(grads: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Dense contiguous gradients that share no storage with anything."""
    seen = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    owned = []
    for grad, leaf in zip(grads, leaves, strict=True):
        if grad is None:
            owned.append(torch.zeros_like(leaf, memory_format=torch.contiguous_format).detach())
            continue
        dense = grad.to_dense() if grad.layout != torch.strided else grad
        if not dense.is_contiguous() or dense.untyped_storage().data_ptr() in seen:
            dense = dense.clone(memory_format=torch.contiguous_format)
        seen.add(dense.untyped_storage().data_ptr())
        owned.append(dense.detach())
    return owned


def _detached(out: Any, fulls: Sequence[Tensor]) -> Any:
    """What a function returns, without derivatives and apart from parameters, which will change."""
    borrowed = {full.untyped_storage().data_ptr() for full in fulls}

    def detached(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shares = leaf.layout == torch.strided and leaf.untyped_storage().data_ptr() in borrowed
        return leaf.detach().clone() if shares else leaf.detach()

    return tree.map(detached, out)
