"""One update of parameters: the transform, then `p + u`, fused where a kernel does both."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from zfunc import tree
from zfunc.errors import TreeMismatchError, explain
from zfunc.optim.averages import ema_params
from zfunc.optim.base import (
    ChangedInfo,
    Rates,
    Transform,
    UpdateInfo,
    global_norm,
    learning_rate_of,
)
from zfunc.optim.combine import Chain, PartitionState, partition
from zfunc.optim.fused import match
from zfunc.optim.inject import Injected
from zfunc.optim.lists import add_, scale_, tensors_of
from zfunc.optim.masks import resolve_labels
from zfunc.optim.multi import multi_steps
from zfunc.optim.transforms import clip_by_global_norm
from zfunc.sharded import is_sharded

__all__ = ["Applied", "apply", "apply_updates"]

_NESTED = (partition, multi_steps, Injected)


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """What an update did, for metrics.

    Attributes:
        lr: the learning rate that it used (see `learning_rate_of`).
        grad_norm_clipped: the global norm of the gradients after the clip at the head of the
            transform; None where there is none.
    """

    lr: Rates
    grad_norm_clipped: float | None


@torch.no_grad()
def apply(
    tx: Transform,
    grads: Any,
    state: Any,
    params: Any,
    info: UpdateInfo,
    *,
    threads: int = 1,
) -> tuple[Any, Any, Applied]:
    """Updates parameters in place: `p + u` with `u` the transform's update.

    Overwrites `params`, `state` and `grads`; a caller that must keep one clones it first. A chain
    that means AdamW, by itself or inside of `partition`, `multi_steps` or `inject_hyperparams`,
    before `ema_params` or not, runs in one pass over memory.

    Args:
        tx: the transform.
        grads: a tree like `params`, None where a leaf is frozen.
        state: the transform's state.
        params: the parameters, None where a leaf is frozen.
        info: what is known of whole leaves.
        threads: the number of CPU threads.

    Returns:
        The new parameters (the same tensors), the new state, and what was done.

    Raises:
        TreeMismatchError: gradients and parameters do not have the same leaves.

    Example:
        >>> import torch
        >>> from zfunc import optim
        >>> params, tx = {"w": torch.ones(2)}, optim.sgd(0.5)
        >>> grads = {"w": torch.tensor([1.0, 2.0])}
        >>> apply(tx, grads, tx.init(params), params, optim.LocalInfo())
        ({'w': tensor([0.5000, 0.0000])}, (), Applied(lr=0.5, grad_norm_clipped=None))
    """
    _check_same_leaves(grads, params)
    lr = learning_rate_of(tx, state)
    state, clipped = _step_(tx, grads, state, params, info, threads)
    return params, state, Applied(lr, clipped)


@torch.no_grad()
def apply_updates(params: Any, updates: Any) -> Any:
    """Adds updates to parameters, in new tensors.

    Args:
        params: the parameters.
        updates: a tree like `params`.

    Returns:
        A tree like `params`, in the dtypes of `params`.

    Example:
        >>> import torch
        >>> apply_updates([torch.ones(2)], [torch.tensor([1.0, 2.0])])
        [tensor([2., 3.])]
    """
    _check_same_leaves(updates, params)
    leaves, structure = tree.flatten(params)
    pairs = zip(leaves, tensors_of(updates), strict=True)
    return tree.unflatten(structure, [(param + update).to(param.dtype) for param, update in pairs])


def _step_(
    tx: Transform, grads: Any, state: Any, params: Any, info: UpdateInfo, threads: int
) -> tuple[Any, float | None]:
    """Updates parameters in place; returns the state and the norm after a clip at the head."""
    if isinstance(tx, _NESTED):
        return _step_nested_(tx, grads, state, params, info, threads)
    links, states = (tx.transforms, state) if isinstance(tx, Chain) else ((tx,), (state,))
    head, factor, clipped = (), 1.0, None
    if links and isinstance(links[0], clip_by_global_norm):
        norm = global_norm(grads, info=info)
        factor = links[0].factor(norm)
        clipped = norm * factor
        head, links, states, info = states[:1], links[1:], states[1:], ChangedInfo(info)
    new = (*head, *_step_links_(links, grads, states, params, info, factor, threads))
    return (new if isinstance(tx, Chain) else new[0]), clipped


def _step_links_(
    links: tuple[Transform, ...],
    grads: Any,
    states: tuple[Any, ...],
    params: Any,
    info: UpdateInfo,
    factor: float,
    threads: int,
) -> tuple[Any, ...]:
    """Updates parameters in place by the links of a chain; returns their states."""
    if len(links) > 1 and isinstance(links[-1], ema_params):
        head = _step_links_(links[:-1], grads, states[:-1], params, info, factor, threads)
        return (*head, links[-1].follow_(params, states[-1]))
    fused = match(Chain(links))
    if fused is not None:
        return fused.step_(grads, states, params, grad_scale=factor, threads=threads)
    if factor != 1.0:
        scale_(tensors_of(grads), factor)
    if len(links) == 1 and isinstance(links[0], _NESTED):
        return (_step_nested_(links[0], grads, states[0], params, info, threads)[0],)
    updates, states = Chain(links).update(grads, states, params, info=info)
    add_(tensors_of(params), tensors_of(updates))
    return states


def _step_nested_(
    tx: partition | multi_steps | Injected,
    grads: Any,
    state: Any,
    params: Any,
    info: UpdateInfo,
    threads: int,
) -> tuple[Any, float | None]:
    """Updates parameters in place by what is inside of a transform."""
    if isinstance(tx, partition):
        return _step_parts_(tx, grads, state, params, info, threads), None
    if isinstance(tx, Injected):
        inner, clipped = _step_(tx.now(state), grads, state.inner, params, info, threads)
        return state._replace(inner=inner), clipped
    if not tx.collect_(grads, state):
        return state, None
    inner, _ = _step_(tx.opt, grads, state.inner, params, ChangedInfo(info), threads)
    return state._replace(inner=inner), None


def _step_parts_(
    tx: partition, grads: Any, state: Any, params: Any, info: UpdateInfo, threads: int
) -> PartitionState:
    """Updates the leaves of each label in place."""
    labels = resolve_labels(tx.labels, params, tx.transforms)
    grads, params = tx.split(grads, labels), tx.split(params, labels)
    inner = {
        name: _step_(part, grads[name], state.inner[name], params[name], info, threads)[0]
        for name, part in tx.transforms.items()
    }
    return PartitionState(inner)


def _check_same_leaves(updates: Any, params: Any) -> None:
    """Raises `TreeMismatchError` unless two trees have their leaves at the same paths."""
    got = tree.structure(updates, is_leaf=is_sharded)
    expected = tree.structure(params, is_leaf=is_sharded)
    if got != expected:
        raise TreeMismatchError(
            explain(
                "updates and parameters do not have the same leaves",
                expected=expected,
                got=got,
                do="give a tree like the parameters, with None where they have None",
            )
        )
