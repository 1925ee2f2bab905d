"""Stochastic rounding: to a neighbour, right on average, and alike however a leaf is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.harness import assert_equal, gathered, ranks
from zfunc import Precision, optim, random
from zfunc.masters import _rounded_at_random

BF16 = torch.bfloat16
NARROW = Precision(param=BF16, compute=torch.float32, master=False)
AT_RANDOM = Precision(param=BF16, compute=torch.float32, master=False, stochastic_rounding=True)


def neighbours(x: float) -> tuple[float, float]:
    """The values of bfloat16 next to a number, below and above."""
    nearest = torch.tensor(x).to(BF16)
    exact = float(nearest.float())
    if exact == x:
        return exact, exact
    away = torch.nextafter(nearest, torch.tensor(math.inf if exact < x else -math.inf, dtype=BF16))
    return tuple(sorted((exact, float(away.float()))))  # pyright: ignore


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(0, 2**40))
def test_a_number_goes_to_a_neighbour(x: float, seed: int) -> None:
    rounded = _rounded_at_random(torch.full((50,), x), random.key(seed), 0)
    assert rounded.equal(rounded.to(BF16).float()), "exact in bfloat16"
    assert set(rounded.tolist()) <= set(neighbours(x))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_is_the_number_itself(share: float, sign: int) -> None:
    """The nearer neighbour is the likelier: within 5 standard deviations of a binomial."""
    n, unit = 100_000, 2.0**-7
    x = sign * torch.tensor(1 + share * unit)
    rounded = _rounded_at_random(x.expand(n), random.key(3), 0)
    away = float((rounded.abs() > 1).double().mean())
    exact = (abs(float(x)) - 1) / unit
    assert abs(away - exact) < 5 * math.sqrt(exact * (1 - exact) / n)


def test_what_is_not_finite_stays() -> None:
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    rounded = _rounded_at_random(special, random.key(0), 0)
    assert torch.testing.assert_close(rounded, special, rtol=0, atol=0, equal_nan=True) is None
    assert math.copysign(1, rounded[4]) == -1


def loss_fn(p: Any, b: Tensor) -> Tensor:
    return (p["w"] * b).sum() + p["v"].sum()


def train(mesh: zfunc.Mesh, precision: Precision, stage: int, steps: int) -> list[Tensor]:
    step = zfunc.shard(loss_fn, mesh, precision=precision, specs=zfunc.zero(stage))
    state = step.init({"w": torch.ones(1001), "v": torch.ones(7)}, optim.sgd(2.0**-11))
    for _ in range(steps):
        state, _ = step(state, torch.ones(1001))
    return gathered(state.params)


def test_updates_below_half_a_unit_are_kept_on_average_and_lost_otherwise() -> None:
    """100 updates of an eighth of a unit below one (2**-8): in all 100 / 2**11."""
    lost = train(zfunc.mesh(), NARROW, 3, 100)
    kept = train(zfunc.mesh(), AT_RANDOM, 3, 100)
    assert all(leaf.eq(1).all() for leaf in lost)
    mean = 1 - kept[1].float().mean().item()  # leaves are in canonical order: v, w
    deviation = 2.0**-8 * math.sqrt(100 * (1 / 8) * (7 / 8) / 1001)
    assert abs(mean - 100 * 2.0**-11) < 5 * deviation


@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 3}, {"replica": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_cut_rounds_alike(axes: Any, stage: int) -> None:
    alone = train(zfunc.mesh(), AT_RANDOM, 3, 5)
    for leaves in ranks(axes, train, AT_RANDOM, stage, 5):
        assert_equal(leaves, alone)


def test_rounding_at_random_is_for_leaves_without_masters() -> None:
    with pytest.raises(zfunc.LayoutError, match="master=False"):
        Precision(param=BF16, stochastic_rounding=True)
    half = Precision(param=torch.float16, master=False, stochastic_rounding=True)
    with pytest.raises(zfunc.LayoutError, match="bfloat16"):
        zfunc.shard(loss_fn, zfunc.mesh(), precision=half).init({"w": torch.ones(3)}, optim.sgd(1))


def test_an_update_without_a_master_is_computed_in_float32() -> None:
    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss_fn, mesh, precision=NARROW)
        state = step.init({"w": torch.full((8,), 1.5), "v": torch.ones(3)}, optim.adamw(2.0**-4))
        moments = {
            leaf.dtype
            for leaf in zfunc.tree.leaves(state.opt_state, is_leaf=_is_piece)
            if leaf.shape
        }
        state, _ = step(state, torch.ones(8))
        return gathered(state.params), moments

    wide = torch.full((8,), 1.5).requires_grad_()
    other = torch.optim.AdamW([wide], lr=2.0**-4, weight_decay=1e-2)
    wide.sum().backward()
    other.step()
    for (_, w), moments in ranks(2, run):
        assert_equal([w], [wide.detach().to(BF16)])
        assert moments == {torch.float32}


def _is_piece(node: Any) -> bool:
    return isinstance(node, zfunc.Sharded)
