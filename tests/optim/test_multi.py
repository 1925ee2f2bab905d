"""Several calls to one update: what happens at the k-th, and that nothing happens before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optim.cutting import clone
from tests.optim.test_torch import assert_close, make, ours, theirs
from zfunc import optim, schedules, tree

BOTH = pytest.mark.parametrize("fused", [True, False], ids=["apply", "update"])


def means(steps: list[Any], k: int) -> list[Any]:
    """The mean of every k gradients."""
    windows = [steps[start : start + k] for start in range(0, len(steps), k)]
    return [{n: torch.stack([g[n] for g in w]).mean(0) for n in w[0]} for w in windows]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_means_go_to_the_optimizer(k: int, dtype: torch.dtype, fused: bool):
    params, steps = make(dtype)
    got = ours(optim.multi_steps(optim.adamw(0.01), k), params, steps, fused=fused)
    oracle = theirs(lambda leaves: torch.optim.AdamW(leaves, lr=0.01), params, means(steps, k))
    assert_close(got, oracle)


@BOTH
def test_one_call_is_the_transform_bit_for_bit(fused: bool):
    params, steps = make(torch.float32)
    for tx in (optim.sgd(0.1, 0.9), optim.lion(0.01), optim.adamw(0.01)):
        got = ours(optim.multi_steps(tx, 1), params, steps, fused=fused)
        expected = ours(tx, params, steps, fused=fused)
        assert all(torch.equal(got[name], expected[name]) for name in params)


@BOTH
def test_sums_if_asked_for(fused: bool):
    params, steps = make()
    tx = optim.multi_steps(optim.sgd(0.1, 0.9), 4, use_grad_mean=False)
    sums = [{n: 4 * x for n, x in grads.items()} for grads in means(steps, 4)]
    oracle = theirs(lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9), params, sums)
    assert_close(ours(tx, params, steps, fused=fused), oracle)


def test_nothing_moves_before_the_last_call():
    params = {"a": torch.tensor([1.0, -0.0, 2.0]), "b": None}
    tx = optim.multi_steps(optim.chain(optim.adamw(schedules.linear(1.0, 0.0, 4))), 3)
    state, now = tx.init(params), clone(params)
    for call in range(6):
        inner = clone(state.inner)
        grads = {"a": torch.full((3,), float(call)), "b": None}
        before = now["a"].clone()
        now, state, applied = optim.apply(tx, grads, state, now, optim.LocalInfo())
        pairs = list(zip(tree.leaves(state.inner), tree.leaves(inner), strict=True))
        if call % 3 == 2:
            assert all(not torch.equal(new, old) for new, old in pairs)
            assert not torch.equal(now["a"], before)
            assert not tree.leaves(state.acc_grads)[0].any()
        else:
            assert all(torch.equal(new, old) for new, old in pairs)
            assert torch.equal(now["a"].view(torch.int32), before.view(torch.int32))
        assert applied.lr == 1.0 - 0.25 * (call // 3)
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 2)


def test_updates_between_are_zero():
    params, steps = make()
    tx = optim.multi_steps(optim.sgd(1.0), 2)
    state = tx.init(params)
    for call, grads in enumerate(steps[:4]):
        updates, state = tx.update(clone(grads), state, params, info=optim.LocalInfo())
        assert all(bool(x.any()) == (call % 2 == 1) for x in updates.values())


def test_a_clip_inside_sees_the_mean_and_one_before_it_each_gradient():
    clip, sgd = optim.clip_by_global_norm(1.0), optim.sgd(1.0)
    grads = [torch.tensor([8.0]), torch.tensor([-4.0])]
    for tx, expected in (
        (optim.multi_steps(optim.chain(clip, sgd), 2), -1.0),
        (optim.chain(clip, optim.multi_steps(sgd, 2)), 0.0),
    ):
        for through_apply in (True, False):
            params = {"a": torch.zeros(1)}
            state, info = tx.init(params), optim.LocalInfo()
            for grad in grads:
                if through_apply:
                    params, state, _ = optim.apply(tx, {"a": grad.clone()}, state, params, info)
                else:
                    updates, state = tx.update({"a": grad.clone()}, state, params, info=info)
                    params = optim.apply_updates(params, updates)
            assert float(params["a"]) == expected


def test_windows_may_follow_a_schedule():
    tx = optim.multi_steps(optim.sgd(1.0), lambda count: [0.5, 2.9, 3.0][min(count, 2)])
    params = {"a": torch.zeros(1)}
    state, moved = tx.init(params), []
    for call in range(9):
        before = float(params["a"])
        grads = {"a": torch.ones(1)}
        params, state, _ = optim.apply(tx, grads, state, params, optim.LocalInfo())
        moved += [call] if float(params["a"]) != before else []
    assert moved == [0, 2, 5, 8]
    assert float(params["a"]) == -4.0


def test_wide_gradients_of_narrow_leaves():
    params = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    tx = optim.multi_steps(optim.sgd(1.0), 2)
    state = tx.init(params)
    for _ in range(2):
        grads = {"a": torch.full((2,), 3.0)}
        params, state, _ = optim.apply(tx, grads, state, params, optim.LocalInfo())
    assert params["a"].dtype == torch.bfloat16 and params["a"].tolist() == [-3.0, -3.0]
