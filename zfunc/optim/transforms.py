"""The pieces that optimizers are chained from; names, arguments and meaning as in optax.

These keep no state but a schedule's count; `moments.py` has those that do. In the equations g is
the update that comes in, u the one that goes out, p the parameter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from zfunc.optim.base import UpdateInfo, check_range, global_norm
from zfunc.optim.lists import (
    add_scaled_,
    scale_,
    tensors_of,
)
from zfunc.optim.masks import Mask, resolve_mask
from zfunc.optim.rates import Rate, advance, init_rate, rate_value
from zfunc.schedules import Schedule

__all__ = [
    "add_decayed_weights",
    "clip_by_global_norm",
    "scale",
    "scale_by_learning_rate",
    "scale_by_schedule",
]


@dataclasses.dataclass(frozen=True, slots=True)
class scale:
    """Multiplies updates by a number: `u = step_size * g`.

    Args:
        step_size: the number.
    """

    step_size: float

    def init(self, params: Any) -> tuple[()]:
        """Makes no state."""
        return ()

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Scales the updates in place."""
        scale_(tensors_of(updates), self.step_size)
        return updates, state


@dataclasses.dataclass(frozen=True, slots=True)
class scale_by_schedule:
    """Multiplies updates by a schedule of the updates applied so far: `u = f(count) * g`.

    Args:
        step_size_fn: the schedule.
    """

    step_size_fn: Schedule

    def init(self, params: Any) -> Any:
        """Makes the schedule's count."""
        return init_rate(self.step_size_fn)

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Scales the updates in place and counts."""
        scale_(tensors_of(updates), rate_value(self.step_size_fn, state))
        return updates, advance(state)


@dataclasses.dataclass(frozen=True, slots=True)
class scale_by_learning_rate:
    """Multiplies updates by minus the learning rate: `u = -learning_rate * g`.

    Args:
        learning_rate: a number, or a schedule of the updates applied so far.
    """

    learning_rate: Rate

    def init(self, params: Any) -> Any:
        """Makes the schedule's count, if there is a schedule."""
        return init_rate(self.learning_rate)

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Scales the updates in place and counts."""
        scale_(tensors_of(updates), -rate_value(self.learning_rate, state))
        return updates, advance(state)

    def learning_rate_of(self, state: Any) -> float:
        """The learning rate of the next update."""
        return rate_value(self.learning_rate, state)


@dataclasses.dataclass(frozen=True, slots=True)
class clip_by_global_norm:
    """Scales all updates down to a global norm, if theirs is larger.

        u = g * (max_norm / norm)    if norm > max_norm
        u = g, bit for bit           otherwise (also when the norm is NaN)

    The norm is that of the whole leaves over all ranks (Pascanu et al. 2013, "On the difficulty of
    training recurrent neural networks", algorithm 1). `torch.nn.utils.clip_grad_norm_` divides by
    `norm + 1e-6` and multiplies also by a factor of 1: it clips a little below the bound.

    Args:
        max_norm: the largest norm that passes.

    Raises:
        ValueError: `max_norm` is not positive.
    """

    max_norm: float

    def __post_init__(self) -> None:
        check_range("max_norm", self.max_norm, self.max_norm > 0, "more than 0")

    def init(self, params: Any) -> tuple[()]:
        """Makes no state."""
        return ()

    def factor(self, norm: float) -> float:
        """What updates of that norm are multiplied by."""
        return self.max_norm / norm if norm > self.max_norm else 1.0

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Clips the updates in place."""
        factor = self.factor(global_norm(updates, info=info))
        if factor != 1.0:
            scale_(tensors_of(updates), factor)
        return updates, state


@dataclasses.dataclass(frozen=True, slots=True)
class add_decayed_weights:
    """Adds a multiple of the parameters: `u = g + weight_decay * p`.

    After `scale_by_adam` this is AdamW's decoupled decay, before it an L2 penalty.

    Args:
        weight_decay: a number, or a schedule of the updates applied so far.
        mask: which leaves decay: a tree of bools (a prefix tree will do), or a function of a leaf's
            path ("h/0/w") and whole shape; None for all.
    """

    weight_decay: Rate = 0.0
    mask: Mask | None = dataclasses.field(default=None, hash=False)

    def init(self, params: Any) -> Any:
        """Makes the schedule's count, if there is a schedule.

        Raises:
            TreeMismatchError: the mask does not fit the parameters.
        """
        resolve_mask(self.mask, params)
        return init_rate(self.weight_decay)

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Adds to the updates in place and counts."""
        marked = resolve_mask(self.mask, params)
        pairs = zip(tensors_of(updates), tensors_of(params), marked, strict=True)
        decayed = [(out, param) for out, param, decays in pairs if decays]
        outs, tensors = [out for out, _ in decayed], [param for _, param in decayed]
        add_scaled_(outs, tensors, rate_value(self.weight_decay, state))
        return updates, advance(state)
