"""Transforms that keep one running value per element: Lion's mean and Adagrad's sum.

Names and arguments are optax's, the arithmetic is torch's where the two differ, and complex numbers
are pairs of reals. In the equations g is the update that comes in, u the one that goes out.
"""
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc import tree
from zfunc.optim.base import UpdateInfo, check_range
from zfunc.optim.lists import add_, as_real, batches, scale_, scaled, tensors_of

__all__ = ["LionState", "RssState", "scale_by_lion", "scale_by_rss"]


class LionState(NamedTuple):
    """The moving mean of past updates."""

    mu: Any


@dataclasses.dataclass(frozen=True, slots=True)
class scale_by_lion:
    """Takes the sign of a mean of the update and a moving mean of past ones.

        u  = sign(b1 * mu + (1 - b1) * g)
        mu = b2 * mu + (1 - b2) * g

    Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2 (Lion). The sign
    of 0 and of NaN is 0; a complex number is a pair of reals with a sign each (to optax it is
    `z / abs(z)`). The mean has the dtype of the parameters.

    Args:
        b1: the share of the past in the direction.
        b2: the decay rate of the mean.

    Raises:
        ValueError: a rate outside [0, 1).

    Example:
        >>> from zfunc import optim
        >>> tx, params = scale_by_lion(), [torch.zeros(3)]
        >>> grads = [torch.tensor([0.5, 0.0, -9.0])]
        >>> tx.update(grads, tx.init(params), params, info=optim.LocalInfo())[0]
        [tensor([ 1.,  0., -1.])]
    """

    b1: float = 0.9
    b2: float = 0.99

    def __post_init__(self) -> None:
        check_range("b1", self.b1, 0 <= self.b1 < 1, "from 0 up to below 1")
        check_range("b2", self.b2, 0 <= self.b2 < 1, "from 0 up to below 1")

    def init(self, params: Any) -> LionState:
        """Makes a zero mean."""
        return LionState(tree.map(torch.zeros_like, params))

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Overwrites the updates and the mean."""
        grads, mu = _pairs(updates, state.mu)
        for batch in batches(grads):
            self._direction_(as_real(grads[batch]), as_real(mu[batch]))
        return tree.unflatten(tree.structure(updates), grads), state

    def _direction_(self, grads: list[Tensor], mu: list[Tensor]) -> None:
        parts = scaled(grads, 1 - self.b2)
        scale_(grads, 1 - self.b1)
        add_(grads, scaled(mu, self.b1))
        torch._foreach_sign_(grads)
        scale_(mu, self.b2)
        add_(mu, parts)


class RssState(NamedTuple):
    """The sum of the squares of all updates."""

    sum_of_squares: Any


@dataclasses.dataclass(frozen=True, slots=True)
class scale_by_rss:
    """Divides updates by the root of the sum of the squares of all of them so far.

        s = s + g**2          (s begins at initial_accumulator_value)
        u = g / (sqrt(s) + eps)

    Duchi, Hazan and Singer 2011, "Adaptive Subgradient Methods", figure 1 with diagonal matrices,
    as `torch.optim.Adagrad` has it, defaults included (optax adds `eps` below the root and has 0.1
    and 1e-7). The sum has the dtype of the parameters.

    Args:
        initial_accumulator_value: where the sum begins.
        eps: added to the root.

    Raises:
        ValueError: a negative argument, or both 0: an update of 0 would become NaN.

    Example:
        >>> from zfunc import optim
        >>> tx, params = scale_by_rss(eps=1.0), [torch.zeros(2)]
        >>> grads = [torch.tensor([3.0, -1.0])]
        >>> tx.update(grads, tx.init(params), params, info=optim.LocalInfo())[0]
        [tensor([ 0.7500, -0.5000])]
    """

    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        start, eps = self.initial_accumulator_value, self.eps
        check_range("initial_accumulator_value", start, start >= 0, "0 or more")
        check_range("eps", eps, eps > 0 or (eps == 0 and start > 0), "more than 0, or 0 with a sum")

    def init(self, params: Any) -> RssState:
        """Makes the sums."""
        start = self.initial_accumulator_value

        def begin(param: Tensor) -> Tensor:
            return torch.full_like(param, complex(start, start) if param.is_complex() else start)

        return RssState(tree.map(begin, params))

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Overwrites the updates and the sums."""
        grads, sums = _pairs(updates, state.sum_of_squares)
        for batch in batches(grads):
            self._direction_(as_real(grads[batch]), as_real(sums[batch]))
        return tree.unflatten(tree.structure(updates), grads), state

    def _direction_(self, grads: list[Tensor], sums: list[Tensor]) -> None:
        add_(sums, list(torch._foreach_mul(grads, grads)))
        roots = torch._foreach_sqrt(sums)
        torch._foreach_add_(roots, self.eps)
        torch._foreach_div_(grads, roots)


def _pairs(updates: Any, memory: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of updates and of what is kept, in the dtypes of what is kept."""
    kept = tensors_of(memory)
    pairs = zip(tensors_of(updates), kept, strict=True)
    return [update.to(old.dtype).resolve_conj() for update, old in pairs], kept
