"""One rewrite rule: a chain that means AdamW runs as one pass over memory.

`scale_by_adam`, `add_decayed_weights` (or none), `scale_by_learning_rate`, in this order and after
a clip or not, is what `zfunc.ops.adamw_` computes. The moments agree with the chain's bit for bit.
The parameters agree up to the rounding of the last operations, which the kernel does in another
order; to first order, for float32,

    |fused - chain| <= (2 |p| + 20 lr (|u| + weight_decay |p|)) * 2**-24

with p the parameter and u Adam's direction (2**-53 for float64). Leaves of other dtypes, devices or
strides take the chain's own way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from zfunc import ops
from zfunc.optim.base import Transform
from zfunc.optim.combine import Chain
from zfunc.optim.lists import add_, add_scaled_, count_up_, scale_, tensors_of
from zfunc.optim.masks import resolve_mask
from zfunc.optim.moments import scale_by_adam
from zfunc.optim.rates import advance, rate_value
from zfunc.optim.transforms import (
    add_decayed_weights,
    clip_by_global_norm,
    scale_by_learning_rate,
)

__all__ = ["FusedAdamW", "match"]

_KERNELS = frozenset({(torch.float32, True, True), (torch.float64, True, True)})
_DTYPE, _IS_CPU = attrgetter("dtype"), attrgetter("is_cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class FusedAdamW:
    """A chain that `match` recognised.

    Attributes:
        adam: the first link.
        decay: the second link, if the chain has it.
        rate: the last link.
    """

    adam: scale_by_adam
    decay: add_decayed_weights | None
    rate: scale_by_learning_rate

    def step_(
        self, grads: Any, state: Sequence[Any], params: Any, *, grad_scale: float, threads: int
    ) -> tuple[Any, ...]:
        """Updates parameters and state in place.

        Args:
            grads: a tree like `params`; may be overwritten.
            state: the state of each link.
            params: the parameters, overwritten.
            grad_scale: what gradients are multiplied by first (the clip factor).
            threads: the number of CPU threads.

        Returns:
            The new state of each link.
        """
        moments = state[0]
        tensors = tensors_of(params)
        leaves = _Leaves(
            params=tensors,
            grads=tensors_of(grads),
            mu=tensors_of(moments.mu),
            nu=tensors_of(moments.nu),
            steps=count_up_(moments.count),
            decay=self._decay_of(state, params, len(tensors)),
        )
        lr = self.rate.learning_rate_of(state[-1])
        groups, others = leaves.groups()
        for index in groups:
            group = leaves.take(index)
            ops.adamw_(
                group.params,
                group.grads,
                group.mu,
                group.nu,
                lr=lr,
                b1=self.adam.b1,
                b2=self.adam.b2,
                eps=self.adam.eps,
                weight_decay=group.decay,
                step=group.steps,
                grad_scale=grad_scale,
                threads=threads,
            )
        if others:
            self._step_unfused_(leaves.take(others), lr, grad_scale)
        return (moments, *map(advance, state[1:]))

    def _decay_of(self, state: Sequence[Any], params: Any, num_leaves: int) -> list[float]:
        """The weight decay of each leaf."""
        if self.decay is None:
            return [0.0] * num_leaves
        decay = rate_value(self.decay.weight_decay, state[1])
        if self.decay.mask is None:
            return [decay] * num_leaves
        return [decay if decays else 0.0 for decays in resolve_mask(self.decay.mask, params)]

    def _step_unfused_(self, leaves: _Leaves, lr: float, grad_scale: float) -> None:
        """The chain's own way."""
        if grad_scale != 1.0:
            scale_(leaves.grads, grad_scale)
        updates = self.adam.directions(leaves.grads, leaves.mu, leaves.nu, leaves.steps)
        decaying = [row for row, decay in enumerate(leaves.decay) if decay]
        if decaying:
            part = leaves.take(decaying)
            add_scaled_([updates[row] for row in decaying], part.params, part.decay[0])
        scale_(updates, -lr)
        add_(leaves.params, updates)


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaves:
    """Columns of a table with one row per leaf."""

    params: list[Tensor]
    grads: list[Tensor]
    mu: list[Tensor]
    nu: list[Tensor]
    steps: list[int]
    decay: list[float]

    def groups(self) -> tuple[list[list[int]], list[int]]:
        """The rows that the kernel takes, one group for each dtype, and the others."""
        columns = self.params, self.grads, self.mu, self.nu
        everything = list(chain.from_iterable(columns))
        if len(kinds := set(_kinds(everything))) == 1 and kinds <= _KERNELS:
            return [list(range(len(self.params)))], []
        found: dict[Any, list[int]] = {kind: [] for kind in _KERNELS}
        others: list[int] = []
        for row, kinds in enumerate(zip(*map(_kinds, columns), strict=True)):
            fits = kinds[0] in found and len(set(kinds)) == 1
            (found[kinds[0]] if fits else others).append(row)
        return [group for group in found.values() if group], others

    def take(self, rows: list[int]) -> _Leaves:
        """The table of some rows."""
        if len(rows) == len(self.params):
            return self
        columns = (getattr(self, field.name) for field in dataclasses.fields(self))
        return _Leaves(*([column[row] for row in rows] for column in columns))


def match(tx: Transform) -> FusedAdamW | None:
    """Recognises a chain that the fused kernel computes.

    Args:
        tx: any transform; a clip by global norm at its head is the kernel's `grad_scale`.

    Returns:
        The links that the kernel stands for, or None.

    Example:
        >>> from zfunc import optim
        >>> match(optim.chain(optim.clip_by_global_norm(1.0), optim.adam(1e-3))) is not None
        True
    """
    links = tx.transforms if isinstance(tx, Chain) else (tx,)
    if links and isinstance(links[0], clip_by_global_norm):
        links = links[1:]
    match links:
        case (scale_by_adam() as adam, scale_by_learning_rate() as rate):
            return FusedAdamW(adam, None, rate)
        case (
            scale_by_adam() as adam,
            add_decayed_weights() as decay,
            scale_by_learning_rate() as rate,
        ):
            return FusedAdamW(adam, decay, rate)
    return None


def _kinds(tensors: list[Tensor]) -> Iterator[tuple[torch.dtype, bool, bool]]:
    """The dtype of each tensor, whether it is on a CPU, whether it is contiguous."""
    contiguous = map(Tensor.is_contiguous, tensors)
    return zip(map(_DTYPE, tensors), map(_IS_CPU, tensors), contiguous, strict=True)
