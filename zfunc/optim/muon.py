"""Muon: momentum whose singular values are all brought near 1, a matter of whole matrices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from zfunc import tree
from zfunc.optim.alias import adamw
from zfunc.optim.base import Transform, UpdateInfo, check_range
from zfunc.optim.combine import chain, partition
from zfunc.optim.lists import add_scaled_, put_piece_, scale_, tensors_of
from zfunc.optim.masks import Mask
from zfunc.optim.rates import Rate
from zfunc.optim.transforms import add_decayed_weights, scale_by_learning_rate
from zfunc.sharded import is_sharded

__all__ = ["MuonState", "muon", "orthogonalized", "scale_by_muon"]

Coefficients = tuple[float, float, float]
Adjust = Literal["original", "match_rms_adamw"]

_QUINTIC: Coefficients = (3.4445, -4.775, 2.0315)


class MuonState(NamedTuple):
    """The moving mean of past updates."""

    mu: Any


@dataclasses.dataclass(frozen=True, slots=True)
class scale_by_muon:
    """Orthogonalises the momentum of each matrix.

        mu = beta * mu + (1 - beta) * g
        u  = s * NS(mu)                 or, with nesterov: s * NS(beta * mu + (1 - beta) * g)

    NS is `orthogonalized`; s is sqrt(max(1, rows / columns)) for adjust "original" and
    0.2 * sqrt(max(rows, columns)) for "match_rms_adamw", which makes the root mean square of u that
    of AdamW's updates. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural
    networks"; Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2; arithmetic and
    defaults of `torch.optim.Muon`, names of optax.

    The momentum is sharded. An update gathers one matrix after the other, with the next one on its
    way, so it needs the memory of the two largest ones; every rank orthogonalises every matrix, and
    keeps its piece.

    Args:
        ns_coeffs: a, b, c of the iteration.
        ns_steps: the number of its rounds.
        ns_dtype: the dtype of the iteration.
        beta: the decay rate of the mean.
        eps: the least that a norm counts.
        nesterov: whether to look one step ahead.
        adjust: which s.

    Raises:
        ValueError: `beta` outside [0, 1), a negative `eps` or `ns_steps`, an unknown `adjust`; in
            `init`: a leaf that is not a matrix.

    Example:
        >>> from zfunc import optim
        >>> tx, params = optim.scale_by_muon(), [torch.eye(2)]
        >>> updates, _ = tx.update([3.0 * torch.eye(2)], tx.init(params), params,
        ...                        info=optim.LocalInfo())
        >>> bool((updates[0].diagonal() - 1).abs().max() < 0.3)
        True
    """

    ns_coeffs: Coefficients = _QUINTIC
    ns_steps: int = 5
    ns_dtype: torch.dtype = torch.bfloat16
    beta: float = 0.95
    eps: float = 1e-7
    nesterov: bool = True
    adjust: Adjust = "original"

    def __post_init__(self) -> None:
        check_range("beta", self.beta, 0 <= self.beta < 1, "from 0 up to below 1")
        check_range("eps", self.eps, self.eps >= 0, "0 or more")
        check_range("ns_steps", self.ns_steps, self.ns_steps >= 0, "0 or more")
        if self.adjust not in ("original", "match_rms_adamw"):
            raise ValueError(f"adjust={self.adjust!r} must be 'original' or 'match_rms_adamw'")

    def init(self, params: Any) -> MuonState:
        """Makes zero momentum."""
        nodes = tree.leaves(params, is_leaf=is_sharded)
        paths = tree.leaf_paths(params, is_leaf=is_sharded)
        for path, leaf in zip(paths, nodes, strict=True):
            if len(leaf.shape) != 2 or leaf.dtype.is_complex:
                kind = f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
                raise ValueError(
                    f"{path} is {kind}, and Muon is for real matrices: give other leaves to "
                    "another transform with optim.partition, or use optim.muon, which does"
                )
        return MuonState(tree.map(torch.zeros_like, params))

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Overwrites the updates and the momentum."""
        grads, means = tensors_of(updates), tensors_of(state.mu)
        scale_(means, self.beta)
        add_scaled_(means, grads, 1 - self.beta)
        scale_(grads, 1 - self.beta if self.nesterov else 0.0)
        add_scaled_(grads, means, self.beta if self.nesterov else 1.0)
        leaves = tree.leaves(updates, is_leaf=is_sharded)
        for leaf, whole in zip(leaves, info.whole(updates), strict=True):
            x = orthogonalized(whole.to(self.ns_dtype), self.ns_coeffs, self.ns_steps, self.eps)
            put_piece_(leaf, x)
            scale_(tensors_of([leaf]), self._factor(*whole.shape))
        return updates, state

    def _factor(self, rows: int, columns: int) -> float:
        if self.adjust == "original":
            return math.sqrt(max(1.0, rows / max(columns, 1)))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonalized(
    matrix: Tensor, coeffs: Coefficients = _QUINTIC, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Moves every singular value near 1, by products of matrices alone.

        x = x / |x|,    then, a few times:    x = a x + (b (x x') + c (x x')**2) x

    With the default coefficients singular values end between 0.68 and 1.13, those below about 1/400
    of the matrix's norm lower (Jordan et al. 2024; Bernstein and Newhouse 2024, "Old Optimizer, New
    Norm", appendix A).

    Args:
        matrix: [rows, columns], real; computed with in its dtype.
        coeffs: a, b, c.
        steps: the number of rounds.
        eps: the least that the norm counts.

    Returns:
        [rows, columns].

    Example:
        >>> orthogonalized(torch.eye(2), (1.5, -0.5, 0.0), steps=10)
        tensor([[1., 0.],
                [0., 1.]])
    """
    a, b, c = coeffs
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@dataclasses.dataclass(frozen=True)
class _Labels:
    """The label of each leaf, from what a mask says of its path and shape."""

    mask: Any

    def __call__(self, path: str, shape: tuple[int, ...]) -> str:
        return "muon" if self.mask(path, shape) else "adam"


def _is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


def muon(
    learning_rate: Rate,
    ns_coeffs: Coefficients = _QUINTIC,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-7,
    weight_decay: Rate = 0.1,
    mask: Mask | None = None,
    *,
    nesterov: bool = True,
    adjust: Adjust = "original",
    ns_dtype: torch.dtype = torch.bfloat16,
    adam_learning_rate: Rate | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    adam_eps: float = 1e-8,
    adam_weight_decay: Rate = 0.0,
) -> Transform:
    """Muon for matrices, AdamW for the other leaves: `torch.optim.Muon` with its usual companion.

    Equations, sources and costs at `scale_by_muon`. An embedding and the head of a language model
    are matrices that Adam should have: say so by `mask`.

    Args:
        learning_rate: a number or a schedule.
        ns_coeffs: a, b, c of the iteration.
        ns_steps: the number of its rounds.
        beta: the decay rate of the momentum.
        eps: the least that a norm counts.
        weight_decay: decoupled, multiplied by the learning rate.
        mask: the leaves for Muon, a tree of bools or `mask(path, shape)`; None for all matrices.
        nesterov: whether to look one step ahead.
        adjust: how an update's size follows the shape of the matrix.
        ns_dtype: the dtype of the iteration.
        adam_learning_rate: the rate of the other leaves; None for the same.
        adam_b1: the decay rate of Adam's mean.
        adam_b2: the decay rate of Adam's mean of squares.
        adam_eps: added to Adam's root.
        adam_weight_decay: the weight decay of the other leaves.

    Returns:
        A partition with the labels "muon" and "adam".

    Example:
        >>> tx = muon(0.02, mask=lambda path, shape: len(shape) == 2 and "embed" not in path)
        >>> sorted(tx.transforms)
        ['adam', 'muon']
    """
    mask = _is_matrix if mask is None else mask
    if callable(mask):
        labels: Any = _Labels(mask)
    else:
        labels = tree.map(lambda mark: "muon" if mark else "adam", mask)
    matrices = chain(
        scale_by_muon(ns_coeffs, ns_steps, ns_dtype, beta, eps, nesterov, adjust),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    others = adamw(rate, adam_b1, adam_b2, adam_eps, adam_weight_decay)
    return partition({"muon": matrices, "adam": others}, labels)
