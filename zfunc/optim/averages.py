"""Exponential moving averages: of updates, as optax's `ema`, and of the parameters themselves.

In the equations g is the update that comes in, u the one that goes out, p the parameter; t counts
the updates of a leaf from 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc import tree
from zfunc.optim.base import UpdateInfo, check_range
from zfunc.optim.lists import (
    add_scaled_,
    batches,
    copy_,
    count_up_,
    new_count,
    scale_,
    tensors_of,
)
from zfunc.sharded import is_sharded

__all__ = ["EmaParamsState", "EmaState", "ema", "ema_params"]


class EmaState(NamedTuple):
    """Per leaf the number of updates, and the moving mean of what came in."""

    count: Any
    ema: Any


@dataclasses.dataclass(frozen=True, slots=True)
class ema:
    """Replaces updates by their moving mean.

        ema = decay * ema + (1 - decay) * g
        u   = ema / (1 - decay**t)       or, without debias: ema

    As `optax.ema`; the debiasing is that of Kingma and Ba 2015, "Adam", section 3. For a mean of
    the parameters see `ema_params`.

    Args:
        decay: the decay rate of the mean.
        debias: whether to correct for the beginning at 0.
        accumulator_dtype: the dtype of the mean, for complex leaves the complex one of its width;
            None for that of each parameter.

    Raises:
        ValueError: `decay` outside [0, 1), or a dtype that is not floating.

    Example:
        >>> from zfunc import optim
        >>> tx = optim.chain(optim.ema(0.9), optim.scale_by_learning_rate(0.1))
    """

    decay: float
    debias: bool = True
    accumulator_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_mean(self.decay, self.accumulator_dtype)

    def init(self, params: Any) -> EmaState:
        """Makes zero means and counts."""

        def begin(param: Tensor) -> Tensor:
            return torch.zeros_like(param, dtype=_dtype(param, self.accumulator_dtype))

        count = tree.map(new_count, params, is_leaf=is_sharded)
        return EmaState(count, tree.map(begin, params))

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Overwrites the updates, the means and the counts."""
        outs, means = tensors_of(updates), tensors_of(state.ema)
        steps = count_up_(state.count)
        scale_(means, self.decay)
        add_scaled_(means, outs, 1 - self.decay)
        copy_(outs, means)
        if self.debias:
            scale_(outs, [1 / (1 - self.decay**t) for t in steps])
        return updates, state


class EmaParamsState(NamedTuple):
    """The moving mean of the parameters."""

    ema: Any


@dataclasses.dataclass(frozen=True, slots=True)
class ema_params:
    """Keeps a moving mean of the parameters; updates go through as they are.

        ema = decay * ema + (1 - decay) * (p + g)        (ema begins as the parameters)

    The last link of a chain: what comes in must be what is added to the parameters. It is
    `torch.optim.swa_utils.get_ema_avg_fn` (optax keeps such a mean outside of the optimizer). The
    means are laid out as the rest of the optimizer's state, and can be gathered or handed to
    `infer` in the place of the parameters.

    Args:
        decay: the decay rate of the mean.
        accumulator_dtype: the dtype of the mean, as for `ema`. A mean in bfloat16 stands still if
            `decay` is near 1: give torch.float32.

    Raises:
        ValueError: `decay` outside [0, 1), or a dtype that is not floating.

    Example:
        >>> from zfunc import optim
        >>> tx = optim.chain(optim.sgd(1.0), optim.ema_params(0.75))
        >>> params, grads = {"w": torch.zeros(1)}, {"w": torch.tensor([-4.0])}
        >>> params, state, _ = optim.apply(tx, grads, tx.init(params), params, optim.LocalInfo())
        >>> params, state[-1].ema
        ({'w': tensor([4.])}, {'w': tensor([1.])})
    """

    decay: float
    accumulator_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_mean(self.decay, self.accumulator_dtype)

    def init(self, params: Any) -> EmaParamsState:
        """Copies the parameters."""

        def begin(param: Tensor) -> Tensor:
            return param.detach().to(_dtype(param, self.accumulator_dtype), copy=True)

        return EmaParamsState(tree.map(begin, params))

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Overwrites the means."""
        steps, leaves, means = tensors_of(updates), tensors_of(params), tensors_of(state.ema)
        for batch in batches(leaves):
            pairs = zip(leaves[batch], steps[batch], strict=True)
            self._follow_(means[batch], [(p + step).to(p.dtype) for p, step in pairs])
        return updates, state

    @torch.no_grad()
    def follow_(self, params: Any, state: EmaParamsState) -> EmaParamsState:
        """Moves the means to parameters that are updated already; overwrites the means."""
        self._follow_(tensors_of(state.ema), tensors_of(params))
        return state

    def _follow_(self, means: list[Tensor], params: list[Tensor]) -> None:
        scale_(means, self.decay)
        add_scaled_(means, params, 1 - self.decay)


def _dtype(param: Tensor, asked: torch.dtype | None) -> torch.dtype:
    """The dtype of a parameter's mean."""
    if asked is None:
        return param.dtype
    return asked.to_complex() if param.is_complex() else asked


def _check_mean(decay: float, dtype: torch.dtype | None) -> None:
    check_range("decay", decay, 0 <= decay < 1, "from 0 up to below 1")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"accumulator_dtype={dtype} must be a real floating dtype")
