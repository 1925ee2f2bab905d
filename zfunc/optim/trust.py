"""The trust ratio: each leaf moves in proportion to its own norm, a matter of all ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from zfunc.optim.base import UpdateInfo, check_range
from zfunc.optim.lists import scale_, tensors_of

__all__ = ["scale_by_trust_ratio"]


@dataclasses.dataclass(frozen=True, slots=True)
class scale_by_trust_ratio:
    """Scales the update of each leaf to the norm of the leaf.

        r = trust_coefficient * max(|p|, min_norm) / (max(|g|, min_norm) + eps)
        u = g * clip(r, min_coeff, max_coeff)
        u = g                                       where one of the two norms is 0

    The norms are 2-norms of whole leaves over all ranks, in float64, at the cost of one small
    exchange for an update. You et al. 2020, "Large Batch Optimization for Deep Learning", the ratio
    of algorithm 2, with the identity for its phi; names and defaults are optax's, the two bounds
    are DeepSpeed's (which has 0.01 and 10).

    Args:
        min_norm: the least that a norm counts.
        trust_coefficient: multiplies the ratio.
        eps: added to the norm of the update.
        min_coeff: the smallest ratio.
        max_coeff: the largest ratio.

    Raises:
        ValueError: a negative argument, or bounds that cross.

    Example:
        >>> from zfunc import optim
        >>> tx, params = scale_by_trust_ratio(), [torch.tensor([3.0, 4.0])]
        >>> tx.update([torch.tensor([0.0, 2.0])], (), params, info=optim.LocalInfo())[0]
        [tensor([0., 5.])]
    """

    min_norm: float = 0.0
    trust_coefficient: float = 1.0
    eps: float = 0.0
    min_coeff: float = 0.0
    max_coeff: float = math.inf

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check_range(field.name, value, value >= 0, "0 or more")
        low, high = self.min_coeff, self.max_coeff
        check_range("max_coeff", high, high >= low, f"at least min_coeff={low}")

    def init(self, params: Any) -> tuple[()]:
        """Makes no state."""
        return ()

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Scales the updates in place."""
        norms = info.sum_squares([params, updates]).sqrt().clamp(min=self.min_norm)
        scale_(tensors_of(updates), self.ratios(*norms.chunk(2)).tolist() if len(norms) else 1.0)
        return updates, state

    def ratios(self, param_norms: Tensor, update_norms: Tensor) -> Tensor:
        """What each leaf's update is multiplied by.

        Args:
            param_norms: float64 [number of leaves].
            update_norms: float64 [number of leaves].

        Returns:
            float64 [number of leaves].
        """
        ratios = self.trust_coefficient * param_norms / (update_norms + self.eps)
        bounded = ratios.clamp(self.min_coeff, self.max_coeff)
        return torch.where((param_norms == 0) | (update_norms == 0), 1.0, bounded)
