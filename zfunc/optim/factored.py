"""Adafactor: second moments of a matrix from those of its rows and columns alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc import schedules, tree
from zfunc.optim.averages import ema
from zfunc.optim.base import Transform, UpdateInfo, check_range
from zfunc.optim.combine import chain
from zfunc.optim.lists import count_up_, new_count, put_piece_, scale_, tensors_of
from zfunc.optim.masks import Mask
from zfunc.optim.rates import Rate
from zfunc.optim.transforms import add_decayed_weights, scale_by_learning_rate
from zfunc.sharded import is_sharded

__all__ = [
    "FactoredState",
    "adafactor",
    "clip_by_block_rms",
    "scale_by_factored_rms",
    "scale_by_param_block_rms",
]


class FactoredState(NamedTuple):
    """The means of squares: by rows and columns, or, of leaves that are not factored, in full.

    A leaf has None in what it does not use.
    """

    count: Any
    v_row: Any
    v_col: Any
    v: Any


@dataclasses.dataclass(frozen=True, slots=True)
class scale_by_factored_rms:
    """Divides updates by the root of a mean of squares that is kept for rows and columns only.

        d     = 1 - t ** -decay_rate
        v_row = d * v_row + (1 - d) * mean of (g**2 + epsilon) over the columns
        v_col = d * v_col + (1 - d) * mean of (g**2 + epsilon) over the rows
        u     = g / sqrt(v_row * v_col / mean(v_row))

    Rows and columns are the two longest dims. A leaf with fewer than two dims that are long enough
    has its mean in full, sharded as the leaf is. Shazeer and Stern 2018, "Adafactor", algorithm 4;
    t is each leaf's own count of applied updates. Names and defaults are optax's.

    The two means are whole on every rank, in float32 or wider. An update gathers one factored leaf
    after the other, with the next one on its way: it needs the memory of the two largest ones.

    Args:
        factored: whether to factor at all.
        decay_rate: how fast the past fades.
        min_dim_size_to_factor: both dims must be that long.
        epsilon: added to the squares.

    Raises:
        ValueError: a `decay_rate` that is not positive, or a negative `epsilon`.

    Example:
        >>> from zfunc import optim
        >>> tx, params = optim.scale_by_factored_rms(min_dim_size_to_factor=1), [torch.ones(2, 3)]
        >>> state = tx.init(params)
        >>> state.v_row[0].shape, state.v_col[0].shape
        (torch.Size([2]), torch.Size([3]))
        >>> tx.update([4 * torch.ones(2, 3)], state, params, info=optim.LocalInfo())[0][0][0]
        tensor([1., 1., 1.])
    """

    factored: bool = True
    decay_rate: float = 0.8
    min_dim_size_to_factor: int = 128
    epsilon: float = 1e-30

    def __post_init__(self) -> None:
        check_range("decay_rate", self.decay_rate, self.decay_rate > 0, "above 0")
        check_range("epsilon", self.epsilon, self.epsilon >= 0, "0 or more")

    def init(self, params: Any) -> FactoredState:
        """Makes zero means and counts."""

        def mean(leaf: Any, which: int) -> Tensor | None:
            dims = self._dims(tuple(leaf.shape))
            if dims is None:
                return None
            shape = [size for dim, size in enumerate(leaf.shape) if dim != dims[which]]
            return torch.zeros(shape, dtype=_wide(leaf.dtype), device=_device(leaf))

        def full(leaf: Any) -> Any:
            if self._dims(tuple(leaf.shape)) is not None:
                return None
            return tree.map(lambda x: torch.zeros_like(x, dtype=_wide(x.dtype)), leaf)

        return FactoredState(
            tree.map(new_count, params, is_leaf=is_sharded),
            tree.map(lambda leaf: mean(leaf, 1), params, is_leaf=is_sharded),
            tree.map(lambda leaf: mean(leaf, 0), params, is_leaf=is_sharded),
            tree.map(full, params, is_leaf=is_sharded),
        )

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Overwrites the updates, the means and the counts."""
        leaves = tree.leaves(updates, is_leaf=is_sharded)
        decays = [1 - step**-self.decay_rate for step in count_up_(state.count)]
        dims = [self._dims(tuple(leaf.shape)) for leaf in leaves]
        rows = list(zip(leaves, dims, decays, strict=True))
        in_full = [(leaf, d) for leaf, pair, d in rows if pair is None]
        for (leaf, d), v in zip(in_full, tensors_of(state.v), strict=True):
            (g,) = tensors_of([leaf])
            v.mul_(d).add_(_squares(g, v.dtype).add_(self.epsilon), alpha=1 - d)
            g.copy_(g * v.rsqrt())
        factored = [(leaf, pair, d) for leaf, pair, d in rows if pair is not None]
        means = zip(tensors_of(state.v_row), tensors_of(state.v_col), strict=True)
        wholes = info.whole([leaf for leaf, _, _ in factored])
        for (leaf, pair, d), (row, col), g in zip(factored, means, wholes, strict=True):
            put_piece_(leaf, self._scaled(g, row, col, pair, d))
        return updates, state

    def _scaled(
        self, g: Tensor, v_row: Tensor, v_col: Tensor, dims: tuple[int, int], d: float
    ) -> Tensor:
        """Moves the means of one whole leaf and returns its u."""
        rows, cols = dims
        squares = _squares(g, v_row.dtype).add_(self.epsilon)
        v_row.mul_(d).add_(squares.mean(cols), alpha=1 - d)
        v_col.mul_(d).add_(squares.mean(rows), alpha=1 - d)
        over = v_row.mean(rows - (rows > cols), keepdim=True)
        scale = (v_row / over).rsqrt().unsqueeze(cols) * v_col.rsqrt().unsqueeze(rows)
        return g * scale

    def _dims(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The dims of rows and of columns: the second longest, the longest."""
        if not self.factored or len(shape) < 2:
            return None
        by_size = sorted(range(len(shape)), key=lambda dim: shape[dim])
        rows, cols = by_size[-2:]
        return (rows, cols) if shape[rows] >= max(self.min_dim_size_to_factor, 1) else None


@dataclasses.dataclass(frozen=True, slots=True)
class clip_by_block_rms:
    """Scales the update of each leaf down to a root mean square of at most `threshold`.

        u = g / max(1, rms(g) / threshold)

    Of whole leaves over all ranks, in float64. Shazeer and Stern 2018, section 6.

    Args:
        threshold: the largest root mean square.

    Raises:
        ValueError: a `threshold` that is not positive.

    Example:
        >>> from zfunc import optim
        >>> tx = optim.clip_by_block_rms(1.0)
        >>> tx.update([torch.full((4,), 3.0)], (), None, info=optim.LocalInfo())[0]
        [tensor([1., 1., 1., 1.])]
    """

    threshold: float

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, self.threshold > 0, "above 0")

    def init(self, params: Any) -> tuple[()]:
        """Makes no state."""
        return ()

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Scales the updates in place."""
        factors = [1 / max(1.0, rms / self.threshold) for rms in _block_rms(updates, info)]
        scale_(tensors_of(updates), factors)
        return updates, state


@dataclasses.dataclass(frozen=True, slots=True)
class scale_by_param_block_rms:
    """Scales the update of each leaf by the root mean square of the leaf.

        u = g * max(rms(p), min_scale)

    Of whole leaves over all ranks, in float64. Shazeer and Stern 2018, section 8.

    Args:
        min_scale: the least that a root mean square counts.

    Raises:
        ValueError: a negative `min_scale`.

    Example:
        >>> from zfunc import optim
        >>> tx, params = optim.scale_by_param_block_rms(), [torch.full((4,), 2.0)]
        >>> tx.update([torch.ones(4)], (), params, info=optim.LocalInfo())[0]
        [tensor([2., 2., 2., 2.])]
    """

    min_scale: float = 1e-3

    def __post_init__(self) -> None:
        check_range("min_scale", self.min_scale, self.min_scale >= 0, "0 or more")

    def init(self, params: Any) -> tuple[()]:
        """Makes no state."""
        return ()

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Scales the updates in place."""
        factors = [max(rms, self.min_scale) for rms in _block_rms(params, info)]
        scale_(tensors_of(updates), factors)
        return updates, state


def adafactor(
    learning_rate: Rate | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    weight_decay_rate: Rate = 0.0,
    eps: float = 1e-30,
    factored: bool = True,
    weight_decay_mask: Mask | None = None,
) -> Transform:
    """Adafactor: Adam's step from the memory of a row and a column per matrix.

    Shazeer and Stern 2018, algorithms 4 to 6; as `torch.optim.Adafactor`, weight decay is
    multiplied by the learning rate. Names are optax's.

    Args:
        learning_rate: a number or a schedule; None for the paper's min(0.01, 1 / sqrt(t)).
        min_dim_size_to_factor: both dims of a factored leaf must be that long.
        decay_rate: how fast the means of squares forget.
        multiply_by_parameter_scale: whether a leaf moves in proportion to its root mean square.
        clipping_threshold: the largest root mean square of a leaf's direction; None for any.
        momentum: the decay rate of a mean of directions, which takes the memory of the parameters
            again; None for none.
        weight_decay_rate: decoupled.
        eps: added to the squares.
        factored: whether to factor at all.
        weight_decay_mask: the leaves that decay; None for all.

    Returns:
        A chain.

    Example:
        >>> from zfunc import optim
        >>> params = {"w": torch.ones(256, 128)}
        >>> means = optim.adafactor().init(params)[0]
        >>> means.v_row["w"].shape, means.v_col["w"].shape, means.v["w"]
        (torch.Size([128]), torch.Size([256]), None)
    """
    rate = schedules.inverse_sqrt(1e-2) if learning_rate is None else learning_rate
    links: list[Transform] = [
        scale_by_factored_rms(factored, decay_rate, min_dim_size_to_factor, eps)
    ]
    if clipping_threshold is not None:
        links.append(clip_by_block_rms(clipping_threshold))
    if multiply_by_parameter_scale:
        links.append(scale_by_param_block_rms())
    if momentum is not None:
        links.append(ema(momentum, debias=False))
    if callable(weight_decay_rate) or weight_decay_rate:
        links.append(add_decayed_weights(weight_decay_rate, weight_decay_mask))
    return chain(*links, scale_by_learning_rate(rate))


def _block_rms(nodes: Any, info: UpdateInfo) -> list[float]:
    """The root mean square of each whole leaf; 0 for one without elements."""
    sizes = [math.prod(leaf.shape) for leaf in tree.leaves(nodes, is_leaf=is_sharded)]
    sums = info.sum_squares(nodes).tolist()
    return [math.sqrt(s / n) if n else 0.0 for s, n in zip(sums, sizes, strict=True)]


def _squares(g: Tensor, dtype: torch.dtype) -> Tensor:
    """|g|**2 in a new tensor."""
    parts = torch.view_as_real(g) if g.is_complex() else g.unsqueeze(-1)
    return parts.to(dtype).square().sum(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The real dtype of a mean of squares: float32 or wider."""
    return torch.promote_types(dtype.to_real(), torch.float32)


def _device(leaf: Any) -> torch.device:
    return (leaf.local if is_sharded(leaf) else leaf).device
