"""Transforms that remember past updates: Adam's two moments, and momentum.

Names, arguments and meaning are optax's, the arithmetic is torch's where the two differ: `eps` is
added after the root, the first step of momentum is the gradient itself, complex numbers are pairs
of reals to Adam. In the equations g is the update that comes in, u the one that goes out; t counts
the updates of a leaf from 1.
"""
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc import tree
from zfunc.optim.base import UpdateInfo, check_range
from zfunc.optim.lists import (
    add_,
    add_scaled_,
    as_real,
    batches,
    copy_,
    count_up_,
    new_count,
    scale_,
    scaled,
    tensors_of,
)
from zfunc.sharded import is_sharded

__all__ = ["AdamState", "TraceState", "scale_by_adam", "trace"]


class AdamState(NamedTuple):
    """Adam's state: per leaf the number of updates and both moments."""

    count: Any
    mu: Any
    nu: Any


@dataclasses.dataclass(frozen=True, slots=True)
class scale_by_adam:
    """Divides a moving mean of the updates by the root of one of their squares.

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        u  = (mu / (1 - b1**t)) / (sqrt(nu / (1 - b2**t)) + eps)

    Kingma and Ba 2015, "Adam", algorithm 1; t is each leaf's own count of applied updates. The
    moments have the dtype of the parameters and are, bit for bit, those of `zfunc.ops.adamw_`.

    Args:
        b1: the decay rate of the mean.
        b2: the decay rate of the mean of squares.
        eps: added to the root.

    Raises:
        ValueError: a decay rate outside [0, 1), or a negative `eps`.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_range("b1", self.b1, 0 <= self.b1 < 1, "from 0 up to below 1")
        check_range("b2", self.b2, 0 <= self.b2 < 1, "from 0 up to below 1")
        check_range("eps", self.eps, self.eps >= 0, "0 or more")

    def init(self, params: Any) -> AdamState:
        """Makes zero moments and counts."""
        return AdamState(
            count=tree.map(new_count, params, is_leaf=is_sharded),
            mu=tree.map(torch.zeros_like, params),
            nu=tree.map(torch.zeros_like, params),
        )

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Overwrites the updates, the moments and the counts."""
        grads, mu, nu = tensors_of(updates), tensors_of(state.mu), tensors_of(state.nu)
        directions = self.directions(grads, mu, nu, count_up_(state.count))
        return tree.unflatten(tree.structure(updates), directions), state

    def directions(
        self, grads: list[Tensor], mu: list[Tensor], nu: list[Tensor], steps: list[int]
    ) -> list[Tensor]:
        """Moves the moments and returns u of each leaf; overwrites the gradients.

        Args:
            grads: the gradient of each leaf.
            mu: the first moment of each leaf, overwritten.
            nu: the second moment of each leaf, overwritten.
            steps: the t of each leaf, this update included.
        """
        grads = [g.to(m.dtype).resolve_conj() for g, m in zip(grads, mu, strict=True)]
        for batch in batches(grads):
            real = as_real(grads[batch]), as_real(mu[batch]), as_real(nu[batch])
            self._direction_(*real, steps[batch])
        return grads

    def _direction_(
        self, grads: list[Tensor], mu: list[Tensor], nu: list[Tensor], steps: list[int]
    ) -> None:
        """Moves the moments and overwrites the gradients with u."""
        parts = scaled(grads, 1 - self.b1)
        scale_(mu, self.b1)
        add_(mu, parts)
        parts = scaled(grads, 1 - self.b2)
        torch._foreach_mul_(parts, grads)
        scale_(nu, self.b2)
        add_(nu, parts)
        roots = torch._foreach_sqrt(nu)
        scale_(roots, [1 / math.sqrt(1 - self.b2**t) for t in steps])
        torch._foreach_add_(roots, self.eps)
        copy_(grads, mu)
        scale_(grads, [1 / (1 - self.b1**t) for t in steps])
        torch._foreach_div_(grads, roots)


class TraceState(NamedTuple):
    """The decaying sum of past updates."""

    trace: Any


@dataclasses.dataclass(frozen=True, slots=True)
class trace:
    """Momentum: a decaying sum of past updates, as `torch.optim.SGD` has it.

        trace = decay * trace + g        (the first time: g)
        u     = trace                    or, with nesterov: g + decay * trace

    Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning",
    section 2; torch's Nesterov form, with the learning rate outside the sum.

    Args:
        decay: the factor of the past.
        nesterov: whether to look one step ahead.

    Raises:
        ValueError: a negative `decay`.
    """

    decay: float
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_range("decay", self.decay, self.decay >= 0, "0 or more")

    def init(self, params: Any) -> TraceState:
        """Makes a zero sum."""
        return TraceState(tree.map(torch.zeros_like, params))

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Overwrites the updates and the sum."""
        grads, sums = tensors_of(updates), tensors_of(state.trace)
        scale_(sums, self.decay)
        add_(sums, grads)
        if self.nesterov:
            add_scaled_(grads, sums, self.decay)
        else:
            copy_(grads, sums)
        return updates, state
