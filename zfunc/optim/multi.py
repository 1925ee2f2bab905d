"""Several calls to one update: gradients are summed in the state until a window is full."""
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc import tree
from zfunc.optim.base import (
    ChangedInfo,
    Rates,
    Transform,
    UpdateInfo,
    check_range,
    learning_rate_of,
)
from zfunc.optim.lists import add_, copy_, new_count, tensors_of
from zfunc.schedules import Schedule

__all__ = ["MultiStepsState", "multi_steps"]


class MultiStepsState(NamedTuple):
    """Calls in this window, full windows, the transform's state, and the sum of the gradients."""

    mini_step: Tensor
    gradient_step: Tensor
    inner: Any
    acc_grads: Any


@dataclasses.dataclass(frozen=True, slots=True)
class multi_steps:
    """Applies a transform at every k-th call, to the mean of the k gradients.

        a = a + g
        u = 0                          in the first k - 1 calls
        u = opt(a / k), then a = 0     in the k-th

    Between updates nothing moves: not the parameters, not the state of `opt`, its counts and
    schedules. A skipped step is no call: the window takes one more. `optax.MultiSteps`, summed and
    divided once at the end instead of averaged on the way. `shard(..., accum=k)` is the same within
    one step, with less memory: the sum here is kept in the optimizer's state.

    Args:
        opt: the transform; a clip inside sees the mean.
        every_k_schedule: k, or a schedule of the updates applied so far whose value, rounded down
            and at least 1, is the k of the next window.
        use_grad_mean: whether to divide by k.

    Raises:
        ValueError: a k below 1, or one that is no int.

    Example:
        >>> from zfunc import optim
        >>> tx, params = multi_steps(optim.sgd(1.0), 2), [torch.zeros(1)]
        >>> state, info = tx.init(params), optim.LocalInfo()
        >>> for grad in (1.0, 3.0):
        ...     grads = [torch.tensor([grad])]
        ...     params, state, _ = optim.apply(tx, grads, state, params, info)
        ...     print(params)
        [tensor([0.])]
        [tensor([-2.])]
    """

    opt: Transform
    every_k_schedule: int | Schedule
    use_grad_mean: bool = True

    def __post_init__(self) -> None:
        k = self.every_k_schedule
        if not callable(k):
            check_range("every_k_schedule", k, isinstance(k, int) and k >= 1, "an int of 1 or more")

    def init(self, params: Any) -> MultiStepsState:
        """Makes an empty window and the state of `opt`."""
        zeros = tree.map(torch.zeros_like, params)
        return MultiStepsState(new_count(), new_count(), self.opt.init(params), zeros)

    @torch.no_grad()
    def update(self, updates: Any, state: Any, params: Any, *, info: UpdateInfo) -> tuple[Any, Any]:
        """Overwrites the updates, the sums and the counts."""
        if not self.collect_(updates, state):
            outs = tensors_of(updates)
            if outs:
                torch._foreach_zero_(outs)
            return updates, state
        updates, inner = self.opt.update(updates, state.inner, params, info=ChangedInfo(info))
        return updates, state._replace(inner=inner)

    @torch.no_grad()
    def collect_(self, updates: Any, state: MultiStepsState) -> bool:
        """Adds to the sums; if that fills the window, empties it into the updates.

        Returns:
            Whether the updates now hold what `opt` is to be applied to.
        """
        outs, sums = tensors_of(updates), tensors_of(state.acc_grads)
        mini, done = tensors_of([state.mini_step, state.gradient_step])
        add_(sums, [out.to(total.dtype) for out, total in zip(outs, sums, strict=True)])
        mini += 1
        k = self._window(int(done))
        if int(mini) < k:
            return False
        mini.zero_()
        done += 1
        if sums:
            if self.use_grad_mean:
                torch._foreach_div_(sums, k)
            copy_(outs, sums)
            torch._foreach_zero_(sums)
        return True

    def learning_rate_of(self, state: Any) -> Rates:
        """The rate of the next update of `opt`."""
        return learning_rate_of(self.opt, state.inner)

    def _window(self, done: int) -> int:
        """The k of the window after so many updates."""
        k = self.every_k_schedule
        return max(1, int(k(done))) if callable(k) else k
