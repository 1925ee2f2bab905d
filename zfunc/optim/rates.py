"""Rates: a hyperparameter that is a number or a schedule.

A schedule reads its transform's own count of applied updates, kept in that transform's state; a
number needs no state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from zfunc.optim.lists import count_up_, new_count, tensors_of
from zfunc.schedules import Schedule

__all__ = ["CountState", "Rate", "advance", "init_rate", "rate_value"]

Rate = float | Schedule


class CountState(NamedTuple):
    """How many updates were applied: a 0-d int64 CPU tensor."""

    count: Tensor


def init_rate(rate: Rate) -> CountState | tuple[()]:
    """The state that a rate needs."""
    return CountState(new_count()) if callable(rate) else ()


def rate_value(rate: Rate, state: Any) -> float:
    """The rate of the next update."""
    return float(rate(int(tensors_of(state)[0]))) if callable(rate) else float(rate)


def advance(state: Any) -> Any:
    """The state after one more update; its count is overwritten."""
    count_up_(state)
    return state
