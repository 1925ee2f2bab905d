"""The curves that schedules are made of; names and arguments are optax's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from torch import Tensor

__all__ = [
    "Schedule",
    "check_steps",
    "check_whole",
    "constant",
    "cosine",
    "fraction",
    "half_cosine",
    "join",
    "linear",
    "polynomial",
    "warmup_cosine",
    "wsd",
]

Schedule = Callable[[int | Tensor], float]


@dataclasses.dataclass(frozen=True, slots=True)
class constant:
    """The same value at every count.

    Args:
        value: the value.

    Example:
        >>> constant(0.5)(10)
        0.5
    """

    value: float

    def __call__(self, count: int | Tensor) -> float:
        return float(self.value)


@dataclasses.dataclass(frozen=True, slots=True)
class linear:
    """A straight line from one value to another.

        f(c) = init + (end - init) * t,    t = clip((c - begin) / steps, 0, 1)

    Args:
        init_value: the value up to count `transition_begin`.
        end_value: the value from count `transition_begin + transition_steps` on.
        transition_steps: the updates that the transition takes.
        transition_begin: the count at which it begins.

    Raises:
        ValueError: a negative number of steps.

    Example:
        >>> [linear(1.0, 0.0, 4)(count) for count in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    init_value: float
    end_value: float
    transition_steps: int
    transition_begin: int = 0

    def __post_init__(self) -> None:
        check_steps(transition_steps=self.transition_steps, transition_begin=self.transition_begin)

    def __call__(self, count: int | Tensor) -> float:
        done = fraction(int(count) - self.transition_begin, self.transition_steps)
        return (1 - done) * self.init_value + done * self.end_value


@dataclasses.dataclass(frozen=True, slots=True)
class polynomial:
    """From one value to another along a power.

        f(c) = end + (init - end) * (1 - t)**power,    t = clip((c - begin) / steps, 0, 1)

    With power 3 and the part of weights that is kept it is the course of Zhu and Gupta 2017, "To
    prune, or not to prune", section 3.

    Args:
        init_value: the value up to count `transition_begin`.
        end_value: the value from count `transition_begin + transition_steps` on.
        power: of the distance that is left.
        transition_steps: the updates that the transition takes.
        transition_begin: the count at which it begins.

    Raises:
        ValueError: a negative number of steps.

    Example:
        >>> [polynomial(1.0, 0.0, 2, 4)(count) for count in range(6)]
        [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """

    init_value: float
    end_value: float
    power: float
    transition_steps: int
    transition_begin: int = 0

    def __post_init__(self) -> None:
        check_steps(transition_steps=self.transition_steps, transition_begin=self.transition_begin)

    def __call__(self, count: int | Tensor) -> float:
        done = fraction(int(count) - self.transition_begin, self.transition_steps)
        return self.end_value + (self.init_value - self.end_value) * (1 - done) ** self.power


@dataclasses.dataclass(frozen=True, slots=True)
class cosine:
    """Half a period of a cosine, from a value down to a fraction of it.

        f(c) = init * (alpha + (1 - alpha) * (1 + cos(pi * t)) / 2),    t = clip(c / steps, 0, 1)

    Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts.

    Args:
        init_value: the value at count 0.
        decay_steps: the updates that the decay takes.
        alpha: the last value as a fraction of `init_value`.

    Raises:
        ValueError: a negative number of steps.

    Example:
        >>> [round(cosine(1.0, 2, alpha=0.1)(count), 6) for count in range(4)]
        [1.0, 0.55, 0.1, 0.1]
    """

    init_value: float
    decay_steps: int
    alpha: float = 0.0

    def __post_init__(self) -> None:
        check_steps(decay_steps=self.decay_steps)

    def __call__(self, count: int | Tensor) -> float:
        end_value = self.init_value * self.alpha
        return half_cosine(self.init_value, end_value, fraction(int(count), self.decay_steps))


@dataclasses.dataclass(frozen=True, slots=True)
class warmup_cosine:
    """A linear rise to a peak, then half a period of a cosine.

        f(c) = init + (peak - init) * c / warmup                             c < warmup
        f(c) = end + (peak - end) * (1 + cos(pi * t)) / 2                    c >= warmup,
        t = clip((c - warmup) / (decay - warmup), 0, 1)

    Args:
        peak_value: the value at count `warmup_steps`.
        warmup_steps: the updates that the rise takes.
        decay_steps: the updates of the whole schedule, the rise included (as in optax).
        init_value: the value at count 0. With 0 the first update changes nothing but the state.
        end_value: the value from count `decay_steps` on.

    Raises:
        ValueError: a negative number of steps, or `decay_steps < warmup_steps`.

    Example:
        >>> [round(warmup_cosine(1.0, 2, 4)(count), 6) for count in range(6)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
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
        done = fraction(count - self.warmup_steps, self.decay_steps - self.warmup_steps)
        return half_cosine(self.peak_value, self.end_value, done)


@dataclasses.dataclass(frozen=True, slots=True)
class wsd:
    """Warmup, stable, decay: a linear rise, a plateau, a linear fall.

        f(c) = init + (peak - init) * c / warmup                             c < warmup
        f(c) = peak                                                          c < warmup + stable
        f(c) = peak + (end - peak) * clip((c - warmup - stable) / decay, 0, 1)   otherwise

    Hu et al. 2024, "MiniCPM", section 4.2, with a linear fall (Haegele et al. 2024, "Scaling Laws
    and Compute-Optimal Training Beyond Fixed Training Durations", section 3).

    Args:
        peak_value: the value of the plateau.
        warmup_steps: the updates that the rise takes.
        stable_steps: the updates that the plateau takes.
        decay_steps: the updates that the fall takes.
        init_value: the value at count 0.
        end_value: the value at the end.

    Raises:
        ValueError: a negative number of steps.

    Example:
        >>> [wsd(1.0, 2, 2, 2)(count) for count in range(8)]
        [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    peak_value: float
    warmup_steps: int
    stable_steps: int
    decay_steps: int
    init_value: float = 0.0
    end_value: float = 0.0

    def __post_init__(self) -> None:
        check_steps(
            warmup_steps=self.warmup_steps,
            stable_steps=self.stable_steps,
            decay_steps=self.decay_steps,
        )

    def __call__(self, count: int | Tensor) -> float:
        count = int(count)
        if count < self.warmup_steps:
            return linear(self.init_value, self.peak_value, self.warmup_steps)(count)
        begin = self.warmup_steps + self.stable_steps
        return linear(self.peak_value, self.end_value, self.decay_steps, begin)(count)


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class join:
    """Schedules one after the other, each counting from its own beginning.

        f(c) = f_i(c - b_i),    b_0 = 0,  b_i <= c < b_(i+1)

    Args:
        schedules: the schedules, one more than boundaries.
        boundaries: the count at which each schedule but the first takes over; rising.

    Raises:
        ValueError: boundaries that do not fit the schedules, are negative or fall.

    Example:
        >>> [join([linear(0.0, 1.0, 2), constant(1.0)], [2])(count) for count in range(4)]
        [0.0, 0.5, 1.0, 1.0]
    """

    schedules: tuple[Schedule, ...]
    boundaries: tuple[int, ...]

    def __init__(self, schedules: Sequence[Schedule], boundaries: Sequence[int]):
        object.__setattr__(self, "schedules", tuple(schedules))
        object.__setattr__(self, "boundaries", tuple(boundaries))
        if len(self.schedules) != len(self.boundaries) + 1:
            raise ValueError(
                f"join got {len(self.schedules)} schedules and {len(self.boundaries)} boundaries: "
                "give one boundary between each two schedules"
            )
        if list(self.boundaries) != sorted(self.boundaries) or min(self.boundaries, default=0) < 0:
            raise ValueError(f"boundaries {list(self.boundaries)} must rise from 0 or more")

    def __call__(self, count: int | Tensor) -> float:
        count = int(count)
        index = sum(count >= boundary for boundary in self.boundaries)
        begin = self.boundaries[index - 1] if index else 0
        return self.schedules[index](count - begin)


def fraction(done: float, steps: float) -> float:
    """How much of a part is over, from 0 to 1."""
    if steps == 0:
        return float(done >= 0)
    return min(max(done / steps, 0.0), 1.0)


def half_cosine(start: float, end: float, done: float) -> float:
    """From `start` to `end` along half a period of a cosine."""
    weight = (1 + math.cos(math.pi * done)) / 2
    return weight * start + (1 - weight) * end


def check_steps(**steps: int) -> None:
    """Raises `ValueError` for a negative number of steps."""
    for name, value in steps.items():
        if value < 0:
            raise ValueError(f"{name}={value} must be 0 or more")


def check_whole(warmup_steps: int, decay_steps: int) -> None:
    """Raises `ValueError` unless the warmup fits into the schedule."""
    check_steps(warmup_steps=warmup_steps, decay_steps=decay_steps)
    if decay_steps < warmup_steps:
        raise ValueError(
            f"decay_steps={decay_steps} counts the whole schedule, the warmup included: "
            f"it must be at least warmup_steps={warmup_steps}"
        )
