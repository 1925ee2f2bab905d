"""Averages: of updates against the equation, of parameters against torch's rule and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import get_ema_avg_fn

from tests.optim.cutting import clone, cut
from tests.optim.test_torch import assert_close, make, ours
from zfunc import optim
from zfunc.layout import Flat, P

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)


@DTYPES
@pytest.mark.parametrize("debias", [True, False])
def test_ema_of_updates(dtype: torch.dtype, debias: bool):
    params, steps = make(dtype)
    tx, info = optim.ema(0.75, debias), optim.LocalInfo()
    state = tx.init(params)
    mean = {name: torch.zeros_like(x) for name, x in params.items()}
    for t, grads in enumerate(steps, 1):
        mean = {name: 0.75 * mean[name] + 0.25 * grads[name] for name in params}
        updates, state = tx.update(clone(grads), state, params, info=info)
        assert_close(state.ema, mean)
        scale = 1 - 0.75**t if debias else 1.0
        assert_close(updates, {name: x / scale for name, x in mean.items()})


def test_the_first_debiased_mean_is_the_update():
    params, (grads, *_) = make()
    tx = optim.ema(0.9)
    updates, _ = tx.update(clone(grads), tx.init(params), params, info=optim.LocalInfo())
    assert_close(updates, grads)


@DTYPES
@pytest.mark.parametrize("through", ["apply", "update"])
def test_ema_of_parameters_follows_torch(dtype: torch.dtype, through: str):
    params, steps = make(dtype)
    mine, theirs = clone(params), clone(params)
    tx, info = optim.chain(optim.adamw(0.01), optim.ema_params(0.75)), optim.LocalInfo()
    state, follow = tx.init(params), get_ema_avg_fn(0.75)
    optimizer = torch.optim.AdamW(list(theirs.values()), lr=0.01)
    mean = clone(params)
    for grads in steps:
        if through == "apply":
            mine, state, _ = optim.apply(tx, clone(grads), state, mine, info)
        else:
            updates, state = tx.update(clone(grads), state, mine, info=info)
            mine = optim.apply_updates(mine, updates)
        for name, param in theirs.items():
            param.grad = grads[name].clone()
        optimizer.step()
        mean = {name: follow(mean[name], x.detach(), 0) for name, x in theirs.items()}
    assert_close(mine, theirs)
    assert_close(state[-1].ema, mean)


@pytest.mark.parametrize("tx", [optim.adamw(0.01), optim.lion(0.01)], ids=["fused", "unfused"])
def test_the_mean_leaves_parameters_as_they_are_bit_for_bit(tx: Any):
    params, steps = make(torch.float32)
    clip = optim.clip_by_global_norm(1.0)
    for before in (tx, optim.chain(clip, tx)):
        followed = ours(optim.chain(before, optim.ema_params(0.9)), params, steps, fused=True)
        alone = ours(before, params, steps, fused=True)
        assert all(torch.equal(followed[name], alone[name]) for name in params)


def test_the_mean_begins_as_a_copy():
    params, _ = make()
    state = optim.ema_params(0.9).init(params)
    for name, x in state.ema.items():
        assert torch.equal(x, params[name]) and x.data_ptr() != params[name].data_ptr()


def test_a_wide_mean_of_narrow_parameters_moves():
    params = {"a": torch.ones(3, dtype=torch.bfloat16), "z": torch.ones(2, dtype=torch.complex64)}
    for dtype, moves in ((None, False), (torch.float32, True)):
        tx = optim.chain(optim.scale(1.0), optim.ema_params(0.999, dtype))
        state, after = tx.init(params), clone(params)
        for _ in range(3):
            grads = {name: torch.full_like(x, 0.25) for name, x in params.items()}
            after, state, _ = optim.apply(tx, grads, state, after, optim.LocalInfo())
        assert bool((state[-1].ema["a"] != 1).all()) == moves
        assert state[-1].ema["a"].dtype == (dtype or torch.bfloat16)
        assert state[-1].ema["z"].dtype == torch.complex64


def test_a_wide_mean_of_narrow_updates():
    params = {"a": torch.zeros(3, dtype=torch.bfloat16)}
    tx = optim.ema(0.5, accumulator_dtype=torch.float64)
    updates, state = tx.update(
        {"a": torch.full((3,), 3.0, dtype=torch.bfloat16)},
        tx.init(params),
        params,
        info=optim.LocalInfo(),
    )
    assert (updates["a"].dtype, state.ema["a"].dtype) == (torch.bfloat16, torch.float64)
    assert updates["a"].tolist() == [3.0] * 3 and state.ema["a"].tolist() == [1.5] * 3


def test_means_follow_the_layout_of_the_parameters():
    params = cut({"a": torch.ones(5), "b": torch.ones(2, 2)}, {"a": Flat(), "b": P()}, 2)[1]
    for state in (optim.ema_params(0.5).init(params), optim.ema(0.5).init(params)):
        assert {name: leaf.layout for name, leaf in state.ema.items()} == {
            name: leaf.layout for name, leaf in params.items()
        }
