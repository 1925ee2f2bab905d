"""Hyperparameters in the state: the same bits, other numbers between updates, no bad numbers."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from tests.optim.cutting import clone
from tests.optim.test_torch import assert_close, make, ours
from zfunc import ops, optim, schedules

INJECT = optim.inject_hyperparams


@dataclasses.dataclass(frozen=True)
class Trained:
    """As much of a training state as `set_hyperparams` asks for."""

    tx: Any
    opt_state: Any

    @staticmethod
    def of(tx: Any) -> Trained:
        return Trained(tx, tx.init({"a": torch.zeros(2), "b": torch.zeros(2)}))

    @property
    def lr(self) -> Any:
        return optim.learning_rate_of(self.tx, self.opt_state)


@pytest.mark.parametrize("fused", [True, False], ids=["apply", "update"])
def test_the_same_bits_as_the_transform(fused: bool):
    params, steps = make(torch.float32)
    kinds = (
        optim.adamw,
        optim.sgd,
        optim.lion,
        optim.lamb,
        optim.adagrad,
        optim.ema,
        optim.adafactor,
    )
    for make_tx in kinds:
        for before in ((), (optim.clip_by_global_norm(1.0),)):
            injected = optim.chain(*before, INJECT(make_tx)(0.1))
            expected = ours(optim.chain(*before, make_tx(0.1)), params, steps, fused=fused)
            got = ours(injected, params, steps, fused=fused)
            assert all(torch.equal(got[name], expected[name]) for name in params)


def test_fused_kernels_stay_in_use():
    params, (grads, *_) = make(torch.float32)
    tx = INJECT(optim.adamw)(0.1)
    with mock.patch.object(ops, "adamw_", wraps=ops.adamw_) as kernel:
        optim.apply(tx, clone(grads), tx.init(params), clone(params), optim.LocalInfo())
    kernel.assert_called_once()


def chained(learning_rate: float, max_norm: float = 1.0) -> Any:
    return optim.chain(optim.clip_by_global_norm(max_norm), optim.sgd(learning_rate))


def test_a_clip_inside_is_reported():
    params, tx = {"a": torch.zeros(2)}, INJECT(chained)(0.5)
    grads = {"a": torch.tensor([3.0, 4.0])}
    _, _, applied = optim.apply(tx, grads, tx.init(params), params, optim.LocalInfo())
    assert (applied.lr, applied.grad_norm_clipped) == (0.5, 1.0)


def test_numbers_set_between_updates_follow_torch():
    params, steps = make()
    tx, info = INJECT(optim.adamw)(0.01), optim.LocalInfo()
    mine, state = clone(params), Trained(tx, tx.init(params))
    theirs = clone(params)
    optimizer = torch.optim.AdamW(list(theirs.values()), lr=0.01)
    for number, grads in enumerate(steps):
        if number % 3 == 1:
            rate, decay = 0.1 / number, 0.02 * number
            state = optim.set_hyperparams(state, learning_rate=rate, weight_decay=decay)
            optimizer.param_groups[0].update(lr=rate, weight_decay=decay)
        assert state.lr == optimizer.param_groups[0]["lr"]
        mine, opt_state, _ = optim.apply(tx, clone(grads), state.opt_state, mine, info)
        state = Trained(tx, opt_state)
        for name, param in theirs.items():
            param.grad = grads[name].clone()
        optimizer.step()
    assert_close(mine, theirs)


def test_which_arguments_are_in_the_state():
    schedule = schedules.linear(1.0, 0.0, 4)
    for tx, names in (
        (INJECT(optim.adamw)(0.1), ["b1", "b2", "eps", "learning_rate", "weight_decay"]),
        (INJECT(optim.adamw)(schedule), ["b1", "b2", "eps", "weight_decay"]),
        (INJECT(optim.adamw, "b1")(0.1), ["b2", "eps", "learning_rate", "weight_decay"]),
        (INJECT(optim.sgd, ["momentum"])(0.1, 0.9, nesterov=True), ["learning_rate"]),
        (INJECT(optim.sgd)(0.1, 0.9), ["learning_rate", "momentum"]),
        (INJECT(optim.scale)(step_size=2), ["step_size"]),
        (INJECT(optim.adamw)(0.1, mask={"a": True}), ["b1", "b2", "eps", "learning_rate"]),
    ):
        numbers = tx.init({"a": torch.zeros(2)}).hyperparams
        assert [*numbers][: len(names)] == names
        for number in numbers.values():
            kind = number.dtype, number.shape, number.device.type
            assert kind == (torch.float64, (), "cpu")


def test_a_schedule_keeps_its_own_count():
    params, info = {"a": torch.zeros(1)}, optim.LocalInfo()
    tx = INJECT(optim.sgd)(schedules.linear(1.0, 0.0, 4), 0.5)
    state, seen = tx.init(params), []
    for _ in range(3):
        params, state, applied = optim.apply(tx, {"a": torch.ones(1)}, state, params, info)
        seen.append(applied.lr)
    assert seen == [1.0, 0.75, 0.5]


def test_whole_numbers_stay_whole():
    def every(k: int) -> Any:
        return optim.multi_steps(optim.sgd(1.0), k)

    state = Trained.of(INJECT(every)(2))
    assert state.tx.now(state.opt_state) == every(2)
    assert state.tx.now(optim.set_hyperparams(state, k=3).opt_state) == every(3)
    with pytest.raises(ValueError, match=r"every_k_schedule=2\.5"):
        optim.set_hyperparams(state, k=2.5)


def test_numbers_are_found_inside_of_other_transforms():
    injected = INJECT(optim.sgd)(0.5)
    for tx in (
        injected,
        optim.chain(optim.clip_by_global_norm(1.0), injected, optim.ema_params(0.5)),
        optim.masked(injected, {"a": True, "b": False}),
        optim.multi_steps(injected, 2),
        optim.multi_steps(optim.chain(optim.scale(1.0), optim.masked(injected, True)), 2),
    ):
        state = Trained.of(tx)
        new = optim.set_hyperparams(state, learning_rate=0.25)
        assert (state.lr, new.lr) == (0.5, 0.25)


def test_labels_choose():
    slow, fast = INJECT(optim.sgd)(0.5), optim.chain(optim.scale(1.0), INJECT(optim.adam)(0.125))
    state = Trained.of(optim.partition({"x": slow, "y": fast}, {"a": "x", "b": "y"}))
    one = optim.set_hyperparams(state, "y", learning_rate=0.25)
    both = optim.set_hyperparams(one, learning_rate=2.0)
    assert state.lr == {"x": 0.5, "y": 0.125}
    assert one.lr == {"x": 0.5, "y": 0.25}
    assert both.lr == {"x": 2.0, "y": 2.0}


def test_what_cannot_be_set_is_refused():
    plain, injected = Trained.of(optim.sgd(0.5)), Trained.of(INJECT(optim.sgd)(0.5, 0.9))
    labelled = Trained.of(optim.partition({"x": injected.tx, "y": plain.tx}, {"a": "x", "b": "y"}))
    adam = Trained.of(INJECT(optim.adam)(schedules.constant(0.5)))
    for state, args, numbers, message in (
        (plain, (), {"learning_rate": 0.1}, "no injected transform has .*inject_hyperparams"),
        (injected, (), {"rate": 0.1}, r"\['rate'\]: set one of \['learning_rate', 'momentum'\]"),
        (labelled, ("y",), {"learning_rate": 0.1}, "under the label 'y'"),
        (labelled, ("z",), {"learning_rate": 0.1}, "under the label 'z'"),
        (adam, (), {"learning_rate": 0.1}, r"set one of \['b1', 'b2', 'eps'\]"),
        (adam, (), {"b1": 1.5}, "b1=1.5"),
        (injected, (), {"momentum": 0.0}, "other parts than the transform before: .*static_args"),
    ):
        with pytest.raises(ValueError, match=message):
            optim.set_hyperparams(state, *args, **numbers)


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match="learning_rate"):
        INJECT(optim.sgd)()
    with pytest.raises(ValueError, match="nesterov"):
        INJECT(optim.sgd)(0.1, nesterov=True)
