"""Pruning: masks that keep a part of a leaf, chosen anew at every use.

How much is kept is a number, or a 0-d tensor that the batch brings: then its course over the steps
is any schedule (`schedules.polynomial` for the cubic one of Zhu and Gupta 2017, "To prune, or not
to prune"). Exactly `round(keep * units)` units are kept; of equal ones those with the lower index.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from zfunc import tree

__all__ = ["Heads", "Magnitude", "Movement", "Rows", "scores_like"]

Keep = float | Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Magnitude:
    """Keeps the elements of largest magnitude (Han et al. 2015, "Learning both Weights and
    Connections for Efficient Neural Networks").

    Args:
        keep: the part of the elements that is kept; None where `transform(..., keep=)` says it.

    Example:
        >>> Magnitude(0.5)(torch.tensor([3.0, -1.0, 2.0, -4.0]))
        tensor([ 3.,  0.,  0., -4.])
    """

    keep: float | None = None

    def mask(self, x: Tensor, keep: Keep) -> Tensor:
        """Bool, of the shape of `x`."""
        return _largest(x.detach().abs().reshape(-1), keep).view(x.shape)

    def __call__(self, x: Tensor, keep: Keep | None = None) -> Tensor:
        """The leaf with zeros where it is pruned."""
        return x.masked_fill(~self.mask(x, _part(self.keep, keep)), 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Keeps whole indices of one dim, those of largest 1-norm (Li et al. 2017, "Pruning Filters
    for Efficient ConvNets").

    Args:
        keep: as for `Magnitude`.
        dim: 0 for the outputs of a torch layer, 1 for its inputs.

    Example:
        >>> Rows(0.5)(torch.tensor([[1.0, 1.0], [5.0, -5.0]]))
        tensor([[ 0.,  0.],
                [ 5., -5.]])
    """

    keep: float | None = None
    dim: int = 0

    def mask(self, x: Tensor, keep: Keep) -> Tensor:
        """Bool, of the shape of `x`."""
        return _by_group(x, keep, self.dim, x.shape[self.dim])

    def __call__(self, x: Tensor, keep: Keep | None = None) -> Tensor:
        """The leaf with zeros where it is pruned."""
        return x.masked_fill(~self.mask(x, _part(self.keep, keep)), 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Keeps whole heads, equal parts of one dim, those of largest 1-norm (Michel et al. 2019, "Are
    Sixteen Heads Really Better than One?").

    Args:
        heads: into how many parts the dim is cut.
        keep: as for `Magnitude`.
        dim: the dim along which heads lie.
    """

    heads: int
    keep: float | None = None
    dim: int = 0

    def mask(self, x: Tensor, keep: Keep) -> Tensor:
        """Bool, of the shape of `x`."""
        if x.shape[self.dim] % self.heads:
            raise ValueError(f"dim {self.dim} of {list(x.shape)} has no {self.heads} equal heads")
        return _by_group(x, keep, self.dim, self.heads)

    def __call__(self, x: Tensor, keep: Keep | None = None) -> Tensor:
        """The leaf with zeros where it is pruned."""
        return x.masked_fill(~self.mask(x, _part(self.keep, keep)), 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Movement:
    """Keeps the elements whose scores are largest; scores are trained with the leaf.

    The gradient of a score is that of the leaf times the leaf, also where it is pruned: scores rise
    where a weight moves away from zero (Sanh et al. 2020, "Movement Pruning", section 4).

    Args:
        keep: as for `Magnitude`.
    """

    keep: float | None = None

    def mask(self, scores: Tensor, keep: Keep) -> Tensor:
        """Bool, of the shape of the scores."""
        return _largest(scores.detach().reshape(-1), keep).view(scores.shape)

    def __call__(self, x: Tensor, keep: Keep | None = None, *, scores: Tensor) -> Tensor:
        """The leaf with zeros where it is pruned."""
        pruned: Any = _Moved.apply(x, scores, self.mask(scores, _part(self.keep, keep)))
        return pruned


def scores_like(params: Any) -> Any:
    """Zero scores for every leaf of a tree, to train beside it."""
    return tree.map(torch.zeros_like, params)


def _part(own: float | None, given: Keep | None) -> Keep:
    if own is None and given is None:
        raise ValueError("how much to keep? give the rule keep=, or transform(..., keep=)")
    part = given if own is None else own
    assert part is not None
    if not isinstance(part, Tensor) and not 0 <= part <= 1:
        raise ValueError(f"keep={part} must be from 0 to 1")
    return part


def _largest(values: Tensor, keep: Keep) -> Tensor:
    """Marks the largest of a vector, by their ranks."""
    order = values.argsort(descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks = ranks.scatter(0, order, torch.arange(len(values), device=values.device))
    if isinstance(keep, Tensor):
        return ranks < (keep.double() * len(values)).round()
    return ranks < round(keep * len(values))


def _by_group(x: Tensor, keep: Keep, dim: int, groups: int) -> Tensor:
    """Marks whole groups of neighbouring indices of one dim."""
    rows = x.detach().movedim(dim, 0).reshape(groups, -1)
    marks = _largest(rows.to(torch.float64).abs().sum(1), keep)
    each = marks.repeat_interleave(x.shape[dim] // groups, output_size=x.shape[dim])
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    return each.view(shape).expand(x.shape)


class _Moved(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(~mask, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, mask = inputs
        ctx.save_for_backward(x, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        x, mask = ctx.saved_tensors
        return grad * mask, grad * x, None
