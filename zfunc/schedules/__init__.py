"""Schedules: the course of a hyperparameter over the updates that were applied.

A schedule is a frozen, value-equal callable `count -> float`, where `count` is the number of
updates applied before this one (so the first update reads `schedule(0)`). Any other function of the
count will do as well. Beyond its end a schedule keeps its last value; a part of 0 steps is over
before it begins.
"""

from zfunc.schedules.curves import (
    Schedule,
    constant,
    cosine,
    join,
    linear,
    polynomial,
    warmup_cosine,
    wsd,
)
from zfunc.schedules.recipes import (
    by_batch,
    cosine_with_min,
    inverse_sqrt,
    lr_range_test,
    one_cycle,
    warmup_linear,
    warmup_ratio,
)

__all__ = [
    "Schedule",
    "by_batch",
    "constant",
    "cosine",
    "cosine_with_min",
    "inverse_sqrt",
    "join",
    "linear",
    "lr_range_test",
    "one_cycle",
    "polynomial",
    "warmup_cosine",
    "warmup_linear",
    "warmup_ratio",
    "wsd",
]
