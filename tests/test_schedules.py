"""Schedules against `torch.optim.lr_scheduler` where it has them, and numpy's piecewise lines."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zfunc import schedules

COUNTS = range(30)


def by_torch(base: float, make: Any) -> list[float]:
    """The rate of every update that a torch scheduler sets."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=base)
    scheduler, rates = make(optimizer), []
    for _ in COUNTS:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def values(schedule: Any) -> list[float]:
    """The schedule at every count."""
    return [schedule(count) for count in COUNTS]


def test_constant():
    assert values(schedules.constant(3e-4)) == [3e-4] * len(COUNTS)


@pytest.mark.parametrize("steps", [1, 7, 29])
def test_linear_follows_torch(steps: int):
    expected = by_torch(
        0.4,
        lambda optimizer: torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0, end_factor=0.25, total_iters=steps
        ),
    )
    assert values(schedules.linear(0.4, 0.1, steps)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("steps", [29, 40])
def test_cosine_follows_torch(steps: int):
    expected = by_torch(
        0.4,
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=0.1),
    )
    assert values(schedules.cosine(0.4, steps, alpha=0.25)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("begin", [0, 4])
def test_linear_waits_for_its_begin(begin: int):
    expected = np.interp(COUNTS, [begin, begin + 8], [0.5, 2.0])
    assert values(schedules.linear(0.5, 2.0, 8, begin)) == pytest.approx(expected, rel=1e-14)


def test_warmup_cosine():
    schedule = schedules.warmup_cosine(2.0, 5, 21, init_value=0.5, end_value=0.25)
    rise = np.interp(COUNTS, [0, 5], [0.5, 2.0])
    fall = 0.25 + 1.75 * np.cos(np.clip((np.arange(30) - 5) / 16, 0, 1) * np.pi / 2) ** 2
    expected = np.where(np.arange(30) < 5, rise, fall)
    assert values(schedule) == pytest.approx(expected, rel=1e-12)
    assert schedule(0) == 0.5
    assert schedule(5) == 2.0
    assert schedule(21) == schedule(10**9) == 0.25


def test_wsd():
    schedule = schedules.wsd(2.0, 4, 10, 8, init_value=0.5, end_value=0.25)
    expected = np.interp(COUNTS, [0, 4, 14, 22], [0.5, 2.0, 2.0, 0.25])
    assert values(schedule) == pytest.approx(expected, rel=1e-14)


def test_join():
    schedule = schedules.join(
        [schedules.linear(0.0, 1.0, 4), schedules.constant(3.0), schedules.linear(1.0, 0.0, 10)],
        [4, 9],
    )
    expected = [c / 4 for c in range(4)] + [3.0] * 5 + [1 - c / 10 for c in range(11)] + [0.0] * 10
    assert values(schedule) == pytest.approx(expected, rel=1e-14)


def test_join_with_an_empty_part_skips_it():
    parts = [schedules.constant(float(i)) for i in range(3)]
    assert [schedules.join(parts, [2, 2])(count) for count in range(4)] == [0.0, 0.0, 2.0, 2.0]


def test_join_is_warmup_cosine():
    joined = schedules.join([schedules.linear(0.0, 1.0, 5), schedules.cosine(1.0, 16)], [5])
    assert values(joined) == values(schedules.warmup_cosine(1.0, 5, 21))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (schedules.linear(1.0, 0.5, 0), [0.5, 0.5]),
        (schedules.linear(1.0, 0.5, 0, 1), [1.0, 0.5]),
        (schedules.cosine(1.0, 0, alpha=0.25), [0.25, 0.25]),
        (schedules.warmup_cosine(1.0, 0, 2), [1.0, 0.5]),
        (schedules.warmup_cosine(1.0, 1, 1, end_value=0.25), [0.0, 0.25]),
        (schedules.warmup_cosine(1.0, 0, 0, end_value=0.25), [0.25, 0.25]),
        (schedules.wsd(1.0, 0, 1, 0, end_value=0.25), [1.0, 0.25]),
        (schedules.wsd(1.0, 0, 0, 2), [1.0, 0.5]),
        (schedules.join([schedules.constant(1.0)], []), [1.0, 1.0]),
        (schedules.join([schedules.constant(1.0), schedules.constant(2.0)], [0]), [2.0, 2.0]),
    ],
)
def test_parts_of_no_steps(schedule: Any, expected: list[float]):
    assert [schedule(0), schedule(1)] == expected


ALL = [
    schedules.constant(0.5),
    schedules.linear(1.0, 0.25, 7),
    schedules.cosine(1.0, 7, alpha=0.25),
    schedules.warmup_cosine(1.0, 3, 9, init_value=0.25, end_value=0.5),
    schedules.wsd(1.0, 3, 2, 4, end_value=0.25),
    schedules.join([schedules.linear(0.25, 1.0, 3), schedules.constant(0.75)], [3]),
]


@given(st.sampled_from(ALL), st.integers(0, 2**40))
def test_stays_between_its_values_and_takes_tensors(schedule: Any, count: int):
    value = schedule(count)
    assert type(value) is float
    assert 0.0 <= value <= 1.0
    assert schedule(torch.tensor(count)) == value


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: type(schedule).__name__)
def test_is_a_value(schedule: Any):
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert eval(repr(schedule), vars(schedules)) == schedule
    assert all(schedule != other for other in ALL if other is not schedule)
    with pytest.raises(AttributeError):
        setattr(schedule, next(iter(schedule.__dataclass_fields__)), 2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.linear(1.0, 0.0, -1), "transition_steps=-1"),
        (lambda: schedules.cosine(1.0, -3), "decay_steps=-3"),
        (lambda: schedules.warmup_cosine(1.0, 10, 5), "at least warmup_steps=10"),
        (lambda: schedules.wsd(1.0, 1, -2, 3), "stable_steps=-2"),
        (lambda: schedules.join([schedules.constant(1.0)], [3]), "1 schedules and 1 boundaries"),
        (lambda: schedules.join([schedules.constant(1.0)] * 3, [3, 2]), "must rise"),
        (lambda: schedules.join([schedules.constant(1.0)] * 2, [-1]), "must rise"),
    ],
)
def test_what_cannot_be_a_schedule_is_refused(make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_area_under_a_cosine_is_half():
    """The midpoint rule is exact for half a period of a cosine, by symmetry."""
    schedule = schedules.cosine(1.0, 1000)
    midpoints = [(schedule(c) + schedule(c + 1)) / 2 for c in range(1000)]
    assert math.fsum(midpoints) == pytest.approx(500, rel=1e-12)
