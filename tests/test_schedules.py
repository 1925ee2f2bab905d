"""Schedules against `torch.optim.lr_scheduler`, transformers' formulas, and piecewise lines."""

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


@pytest.mark.parametrize("three_phase", [False, True])
@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize(
    ("pct_start", "div", "final"), [(0.3, 25.0, 1e4), (0.5, 4.0, 10.0), (0.25, 2.0, 0.5)]
)
def test_one_cycle_follows_torch(
    pct_start: float, div: float, final: float, strategy: Any, three_phase: bool
):
    options: dict[str, Any] = {
        "pct_start": pct_start,
        "anneal_strategy": strategy,
        "div_factor": div,
        "final_div_factor": final,
        "three_phase": three_phase,
    }

    def make(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.4, total_steps=len(COUNTS), cycle_momentum=False, **options
        )

    schedule = schedules.one_cycle(0.4, len(COUNTS), **options)
    assert values(schedule) == pytest.approx(by_torch(0.1, make), rel=1e-12)
    assert schedule(10**9) == schedule(len(COUNTS) - 1)


@pytest.mark.parametrize("pct_start", [0.0, 1.0])
def test_one_cycle_may_only_fall_or_rise(pct_start: float):
    """Torch's formulas, for shares at which torch itself would fail on the last step."""
    schedule = schedules.one_cycle(2.0, 8, pct_start, "linear", 4.0, 5.0)
    points = {0.0: ([-1, 7], [2.0, 0.1]), 1.0: ([0, 7], [0.5, 2.0])}
    expected = np.interp(range(8), *points[pct_start])
    assert [schedule(count) for count in range(8)] == pytest.approx(expected, rel=1e-14)


def by_transformers(factor: Any) -> list[float]:
    """The rate that a factor of the step gives as torch's LambdaLR: how transformers has it."""
    return by_torch(0.4, lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


def rise(step: int, warmup: int) -> float:
    return step / max(1, warmup)


@pytest.mark.parametrize(("warmup", "total"), [(0, 29), (5, 21), (7, 40)])
def test_warmup_linear_follows_transformers(warmup: int, total: int):
    def factor(step: int) -> float:
        if step < warmup:
            return rise(step, warmup)
        return max(0.0, (total - step) / max(1, total - warmup))

    got = values(schedules.warmup_linear(0.4, warmup, total))
    assert got == pytest.approx(by_transformers(factor), rel=1e-12, abs=1e-16)


def test_warmup_linear_between_other_values():
    schedule = schedules.warmup_linear(2.0, 5, 21, init_value=0.5, end_value=0.25)
    expected = np.interp(COUNTS, [0, 5, 21], [0.5, 2.0, 0.25])
    assert values(schedule) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("cycles", [0.5, 1.5, 0.75])
@pytest.mark.parametrize(("warmup", "total"), [(0, 29), (5, 21)])
def test_cosine_with_min_follows_transformers(warmup: int, total: int, cycles: float):
    rate = 0.25

    def factor(step: int) -> float:
        if step < warmup:
            return rise(step, warmup)
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        wave = 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))
        return max(0.0, wave * (1 - rate) + rate)

    expected = pytest.approx(by_transformers(factor), rel=1e-12)
    by_rate = schedules.cosine_with_min(0.4, warmup, total, min_lr_rate=rate, num_cycles=cycles)
    by_value = schedules.cosine_with_min(0.4, warmup, total, min_lr=0.1, num_cycles=cycles)
    assert values(by_rate) == expected
    assert values(by_value) == expected


def test_a_minimum_of_zero():
    for schedule in (
        schedules.cosine_with_min(2.0, 5, 21, min_lr=0.0),
        schedules.cosine_with_min(2.0, 5, 21, min_lr_rate=0.0),
    ):
        assert values(schedule) == values(schedules.warmup_cosine(2.0, 5, 21))


@pytest.mark.parametrize(("ratio", "warmup"), [(0.0, 0), (0.1, 3), (0.15, 5), (1.0, 29)])
def test_warmup_ratio(ratio: float, warmup: int):
    def values_of(kind: str) -> list[float]:
        return values(schedules.warmup_ratio(2.0, ratio, 29, kind))

    assert values_of("linear") == values(schedules.warmup_linear(2.0, warmup, 29))
    assert values_of("cosine") == values(schedules.warmup_cosine(2.0, warmup, 29))
    constant = np.minimum(np.arange(30) / max(1, warmup), 1.0) if warmup else np.ones(30)
    assert values_of("constant_with_warmup") == pytest.approx(2.0 * constant, rel=1e-14)


def test_warmup_ratio_rounds_like_transformers():
    assert schedules.warmup_ratio(1.0, 0.07, 100).warmup_steps == math.ceil(100 * 0.07) == 8


def test_lr_range_test():
    smooth = schedules.lr_range_test(0.5, 4, 0.25)
    stairs = schedules.lr_range_test(0.5, 4, 0.25, staircase=True)
    assert values(smooth) == [0.5 + 0.5 * 0.25 * count / 4 for count in COUNTS]
    assert values(stairs) == [0.5 + 0.5 * 0.25 * (count // 4) for count in COUNTS]
    assert smooth(torch.tensor(8)) == 0.75


def test_the_triangle_of_one_cycle():
    """DeepSpeed's OneCycle, as the docstring of `one_cycle` spells it."""
    low, high = 0.1, 0.4
    triangle = schedules.join(
        [schedules.linear(low, high, 10), schedules.linear(high, low, 5)], [10]
    )
    expected = np.interp(COUNTS, [0, 10, 15], [low, high, low])
    assert values(triangle) == pytest.approx(expected, rel=1e-14)


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
        (schedules.warmup_linear(1.0, 0, 2), [1.0, 0.5]),
        (schedules.warmup_linear(1.0, 1, 1, end_value=0.25), [0.0, 0.25]),
        (schedules.cosine_with_min(1.0, 0, 0, min_lr=0.25), [0.25, 0.25]),
        (schedules.warmup_ratio(1.0, 0.5, 0), [0.0, 0.0]),
        (schedules.one_cycle(1.0, 1, div_factor=2.0, final_div_factor=2.0), [0.25, 0.25]),
        (schedules.one_cycle(1.0, 2, 0.5, div_factor=2.0, final_div_factor=2.0), [1.0, 0.25]),
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
    schedules.warmup_linear(1.0, 3, 9, end_value=0.25),
    schedules.cosine_with_min(1.0, 3, 9, min_lr=0.25, num_cycles=1.5),
    schedules.warmup_ratio(1.0, 0.1, 20, "cosine"),
    schedules.one_cycle(1.0, 20, three_phase=True),
    schedules.inverse_sqrt(0.25),
    schedules.polynomial(1.0, 0.25, 3, 7, 2),
    schedules.by_batch(0.5, [4, 8, 2], 8, "sqrt"),
]


@given(st.sampled_from(ALL), st.integers(0, 2**40))
def test_stays_between_its_values_and_takes_tensors(schedule: Any, count: int):
    value = schedule(count)
    assert type(value) is float
    assert 0.0 <= value <= 1.0
    assert schedule(torch.tensor(count)) == value


@pytest.mark.parametrize(
    "schedule",
    [*ALL, schedules.lr_range_test(0.5, 7)],
    ids=lambda schedule: type(schedule).__name__,
)
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
        (lambda: schedules.warmup_linear(1.0, 10, 5), "at least warmup_steps=10"),
        (lambda: schedules.warmup_linear(1.0, -1, 5), "warmup_steps=-1"),
        (lambda: schedules.cosine_with_min(1.0, 10, 5, 0.1), "at least warmup_steps=10"),
        (lambda: schedules.cosine_with_min(1.0, 1, 5), "exactly one"),
        (lambda: schedules.cosine_with_min(1.0, 1, 5, 0.1, 0.1), "exactly one"),
        (lambda: schedules.warmup_ratio(1.0, 1.5, 10), "ratio=1.5"),
        (lambda: schedules.warmup_ratio(1.0, 0.5, -1), "total_steps=-1"),
        (lambda: schedules.warmup_ratio(1.0, 0.5, 10, "polynomial"), "'polynomial'.*'cosine'"),
        (lambda: schedules.one_cycle(1.0, 0), "total_steps=0"),
        (lambda: schedules.one_cycle(1.0, 9, 1.5), r"pct_start=1.5 must be from 0 to 1\.0"),
        (lambda: schedules.one_cycle(1.0, 9, 0.75, three_phase=True), r"from 0 to 0\.5"),
        (lambda: schedules.one_cycle(1.0, 9, anneal_strategy="cosine"), "'cosine'.*'linear'"),
        (lambda: schedules.one_cycle(1.0, 9, div_factor=0.0), "div_factor=0.0"),
        (lambda: schedules.one_cycle(1.0, 9, final_div_factor=-1.0), "final_div_factor=-1.0"),
        (lambda: schedules.lr_range_test(step_size=0), "step_size=0"),
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
