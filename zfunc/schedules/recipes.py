"""Schedules by the names under which recipes ask for them: transformers', torch's, DeepSpeed's.

Arguments are called as there; what all schedules have in common is called as in optax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from zfunc.schedules.curves import (
    Schedule,
    check_steps,
    check_whole,
    fraction,
    half_cosine,
    linear,
    warmup_cosine,
)

__all__ = [
    "by_batch",
    "cosine_with_min",
    "inverse_sqrt",
    "lr_range_test",
    "one_cycle",
    "warmup_linear",
    "warmup_ratio",
]


@dataclasses.dataclass(frozen=True, slots=True)
class warmup_linear:
    """A linear rise to a peak, then a linear fall.

        f(c) = init + (peak - init) * c / warmup                             c < warmup
        f(c) = peak + (end - peak) * clip((c - warmup) / (decay - warmup), 0, 1)   otherwise

    transformers' `get_linear_schedule_with_warmup` (there `num_warmup_steps, num_training_steps`)
    and DeepSpeed's `WarmupDecayLR` with a linear warmup; arguments as for `warmup_cosine`.

    Args:
        peak_value: the value at count `warmup_steps`.
        warmup_steps: the updates that the rise takes.
        decay_steps: the updates of the whole schedule, the rise included.
        init_value: the value at count 0.
        end_value: the value from count `decay_steps` on.

    Raises:
        ValueError: a negative number of steps, or `decay_steps < warmup_steps`.

    Example:
        >>> [warmup_linear(1.0, 2, 6)(count) for count in range(8)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    peak_value: float
    warmup_steps: int
    decay_steps: int
    init_value: float = 0.0
    end_value: float = 0.0

    def __post_init__(self) -> None:
        check_whole(self.warmup_steps, self.decay_steps)

    def __call__(self, count: int | Tensor) -> float:
        count = int(count)
        if count < self.warmup_steps:
            return linear(self.init_value, self.peak_value, self.warmup_steps)(count)
        steps = self.decay_steps - self.warmup_steps
        return linear(self.peak_value, self.end_value, steps, self.warmup_steps)(count)


@dataclasses.dataclass(frozen=True, slots=True)
class cosine_with_min:
    """A linear rise from 0 to a peak, then a cosine between the peak and a minimum.

        f(c) = peak * c / warmup                                             c < warmup
        f(c) = min + (peak - min) * (1 + cos(2 * pi * num_cycles * t)) / 2   otherwise,
        t = clip((c - warmup) / (decay - warmup), 0, 1)

    transformers' `get_cosine_with_min_lr_schedule_with_warmup`, which goes on along the cosine
    beyond the end, where this keeps its last value.

    Args:
        peak_value: the value at count `warmup_steps`.
        warmup_steps: the updates that the rise takes.
        decay_steps: the updates of the whole schedule, the rise included.
        min_lr: the minimum.
        min_lr_rate: the minimum as a fraction of the peak; give one of the two.
        num_cycles: the periods of the cosine; 0.5 ends at the minimum.

    Raises:
        ValueError: a negative number of steps, `decay_steps < warmup_steps`, or not exactly one
            minimum.

    Example:
        >>> schedule = cosine_with_min(1.0, 2, 4, min_lr_rate=0.5)
        >>> [round(schedule(count), 6) for count in range(6)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.5]
    """

    peak_value: float
    warmup_steps: int
    decay_steps: int
    min_lr: float | None = None
    min_lr_rate: float | None = None
    num_cycles: float = 0.5

    def __post_init__(self) -> None:
        check_whole(self.warmup_steps, self.decay_steps)
        if (self.min_lr is None) == (self.min_lr_rate is None):
            raise ValueError(
                f"min_lr={self.min_lr} and min_lr_rate={self.min_lr_rate}: give exactly one"
            )

    def __call__(self, count: int | Tensor) -> float:
        count = int(count)
        if count < self.warmup_steps:
            return linear(0.0, self.peak_value, self.warmup_steps)(count)
        done = fraction(count - self.warmup_steps, self.decay_steps - self.warmup_steps)
        low = self.min_lr if self.min_lr_rate is None else self.peak_value * self.min_lr_rate
        return half_cosine(self.peak_value, low or 0.0, 2 * self.num_cycles * done)


@dataclasses.dataclass(frozen=True, slots=True)
class warmup_ratio:
    """A linear rise over a share of the training, then one of transformers' usual courses.

        warmup = ceil(total_steps * ratio)

    transformers' `TrainingArguments(learning_rate, warmup_ratio, max_steps, lr_scheduler_type)`.
    The product is rounded as a float there and here: 0.07 of 100 steps are 8.

    Args:
        peak_value: the value after the rise.
        ratio: the share of the updates that the rise takes.
        total_steps: the updates of the whole schedule.
        lr_scheduler_type: "linear" or "cosine" fall to 0, "constant_with_warmup" does not fall.

    Raises:
        ValueError: a ratio outside [0, 1], a negative number of steps, or another type.

    Example:
        >>> [warmup_ratio(1.0, 0.25, 4)(count) for count in range(5)]
        [0.0, 1.0, 0.6666666666666667, 0.33333333333333337, 0.0]
    """

    peak_value: float
    ratio: float
    total_steps: int
    lr_scheduler_type: str = "linear"

    def __post_init__(self) -> None:
        check_steps(total_steps=self.total_steps)
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio} must be from 0 to 1")
        _check_choice(
            "lr_scheduler_type",
            self.lr_scheduler_type,
            ("linear", "cosine", "constant_with_warmup"),
        )

    @property
    def warmup_steps(self) -> int:
        """The updates that the rise takes."""
        return math.ceil(self.total_steps * self.ratio)

    def __call__(self, count: int | Tensor) -> float:
        peak, warmup, total = self.peak_value, self.warmup_steps, self.total_steps
        course: Schedule
        if self.lr_scheduler_type == "linear":
            course = warmup_linear(peak, warmup, total)
        elif self.lr_scheduler_type == "cosine":
            course = warmup_cosine(peak, warmup, total)
        else:
            course = linear(0.0, peak, warmup)
        return course(count)


@dataclasses.dataclass(frozen=True, slots=True)
class one_cycle:
    """One rise to a peak and one fall far below the beginning.

        initial = peak / div_factor at count 0, peak at pct_start * total - 1,
        initial / final_div_factor at total - 1;
        with three_phase: initial again at 2 * pct_start * total - 2

    Smith and Topin 2018, "Super-Convergence", section 4, as `torch.optim.lr_scheduler.OneCycleLR`
    has it, without its course of the momentum. DeepSpeed's `OneCycle` is a triangle:
    `join([linear(low, high, first), linear(high, low, second)], [first])`.

    Args:
        peak_value: the largest value.
        total_steps: the updates of the whole schedule.
        pct_start: the share of them that the rise takes.
        anneal_strategy: "cos" or "linear".
        div_factor: the peak over the value at count 0.
        final_div_factor: the value at count 0 over the last one.
        three_phase: whether to fall to the first value as long as the rise took, then on.

    Raises:
        ValueError: no steps, a share outside [0, 1] (with `three_phase` [0, 0.5]), another
            strategy, or a factor that is not positive.

    Example:
        >>> schedule = one_cycle(1.0, 5, 0.6, "linear", div_factor=2.0, final_div_factor=5.0)
        >>> [round(schedule(count), 6) for count in range(6)]
        [0.5, 0.75, 1.0, 0.55, 0.1, 0.1]
    """

    peak_value: float
    total_steps: int
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    def __post_init__(self) -> None:
        most = 0.5 if self.three_phase else 1.0
        if self.total_steps < 1:
            raise ValueError(f"total_steps={self.total_steps} must be 1 or more")
        if not 0 <= self.pct_start <= most:
            raise ValueError(f"pct_start={self.pct_start} must be from 0 to {most}")
        _check_choice("anneal_strategy", self.anneal_strategy, ("cos", "linear"))
        for name in ("div_factor", "final_div_factor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be more than 0")

    def __call__(self, count: int | Tensor) -> float:
        count = int(count)
        initial, rise = self.peak_value / self.div_factor, self.pct_start * self.total_steps
        points = [(0.0, initial), (rise - 1, self.peak_value)]
        if self.three_phase:
            points.append((2 * rise - 2, initial))
        points.append((self.total_steps - 1, initial / self.final_div_factor))
        pairs = list(pairwise(points))
        (begin, start), (stop, end) = next((p for p in pairs if count <= p[1][0]), pairs[-1])
        done = fraction(count - begin, stop - begin)
        if self.anneal_strategy == "cos":
            return half_cosine(start, end, done)
        return (1 - done) * start + done * end


@dataclasses.dataclass(frozen=True, slots=True)
class lr_range_test:
    """A rate that rises without end, to see from which one on the loss does.

        f(c) = min_lr * (1 + step_rate * c / step_size)      with staircase: floor(c / step_size)

    Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3; DeepSpeed's
    `LRRangeTest`, with its names and defaults.

    Args:
        min_lr: the value at count 0.
        step_size: the updates in which the value grows by `step_rate` times `min_lr`.
        step_rate: how fast it grows.
        staircase: whether it grows once every `step_size` updates.

    Raises:
        ValueError: a `step_size` below 1.

    Example:
        >>> [lr_range_test(0.5, step_size=2)(count) for count in range(5)]
        [0.5, 0.75, 1.0, 1.25, 1.5]
    """

    min_lr: float = 1e-3
    step_size: int = 2000
    step_rate: float = 1.0
    staircase: bool = False

    def __post_init__(self) -> None:
        if self.step_size < 1:
            raise ValueError(f"step_size={self.step_size} must be 1 or more")

    def __call__(self, count: int | Tensor) -> float:
        steps = int(count) // self.step_size if self.staircase else int(count) / self.step_size
        return self.min_lr * (1 + self.step_rate * steps)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {list(choices)}")


@dataclasses.dataclass(frozen=True, slots=True)
class inverse_sqrt:
    """A fall by the root of the number of updates, from a highest value.

        f(c) = min(max_value, scale / sqrt(c + 1))

    Shazeer and Stern 2018, "Adafactor", section 9, where 0.01 and 1 are the two values.

    Args:
        max_value: the highest value.
        scale: the value at count 0 if it is not the higher one.

    Example:
        >>> [inverse_sqrt(0.5)(count) for count in (0, 3, 15)]
        [0.5, 0.5, 0.25]
    """

    max_value: float
    scale: float = 1.0

    def __call__(self, count: int | Tensor) -> float:
        return min(float(self.max_value), self.scale / math.sqrt(int(count) + 1))


@dataclasses.dataclass(frozen=True, slots=True)
class by_batch:
    """A rate in proportion to the batch that an update uses, or to its root.

        f(c) = value(c) * sizes[c] / base_size              rule "linear"
        f(c) = value(c) * sqrt(sizes[c] / base_size)        rule "sqrt"

    Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1; Malladi et al. 2022, "On the
    SDEs and Scaling Rules for Adaptive Gradient Algorithms", for Adam and the root. The count is
    that of applied updates: it runs behind the steps of a plan by those that were skipped. Where
    that matters, set the rate of each step by `optim.set_hyperparams`.

    Args:
        value: the rate for a batch of `base_size`, a number or a schedule.
        sizes: the size of each update's batch, as `data.Plan.samples()` or `.tokens()` tells.
        base_size: the size for which `value` is meant.
        rule: "linear" or "sqrt".

    Raises:
        ValueError: no sizes, a size or `base_size` that is not positive, an unknown rule.

    Example:
        >>> [by_batch(0.1, (8, 32), 8, "sqrt")(count) for count in (0, 1, 2)]
        [0.1, 0.2, 0.2]
    """

    value: float | Schedule
    sizes: Sequence[int]
    base_size: int
    rule: str = "linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if not self.sizes or min(*self.sizes, self.base_size) <= 0:
            raise ValueError("by_batch needs sizes, all of them and base_size above 0")
        if self.rule not in ("linear", "sqrt"):
            raise ValueError(f"rule={self.rule!r} must be 'linear' or 'sqrt'")

    def __call__(self, count: int | Tensor) -> float:
        count = int(count)
        value = self.value(count) if callable(self.value) else self.value
        ratio = self.sizes[min(count, len(self.sizes) - 1)] / self.base_size
        return value * (math.sqrt(ratio) if self.rule == "sqrt" else ratio)
