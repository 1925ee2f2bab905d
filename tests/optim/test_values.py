"""Transforms are values: they compare, hash, print as typed, and pickle."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

from zfunc import optim, schedules, tree
from zfunc.optim import *  # noqa: F403  (repr is evaluated with the public names)
from zfunc.optim.combine import Chain  # noqa: F401
from zfunc.schedules import *  # noqa: F403


def wide(path: str, shape: tuple[int, ...]) -> bool:
    """A mask that pickles."""
    return len(shape) > 1


def make() -> dict[str, Any]:
    """One of each transform, made anew."""
    return {
        "identity": optim.identity(),
        "scale": optim.scale(0.5),
        "scale_by_learning_rate": optim.scale_by_learning_rate(
            schedules.cosine(0.5, 10, alpha=0.1)
        ),
        "scale_by_schedule": optim.scale_by_schedule(schedules.linear(1.0, 0.5, 3)),
        "clip_by_global_norm": optim.clip_by_global_norm(1.0),
        "add_decayed_weights": optim.add_decayed_weights(0.1, {"a": True, "b": [False, True]}),
        "scale_by_adam": optim.scale_by_adam(b2=0.95),
        "trace": optim.trace(0.9, nesterov=True),
        "scale_by_lion": optim.scale_by_lion(b2=0.95),
        "scale_by_rss": optim.scale_by_rss(0.5),
        "lion": optim.lion(schedules.constant(1e-4), weight_decay=0.5),
        "adagrad": optim.adagrad(0.1, eps=1e-3),
        "scale_by_trust_ratio": optim.scale_by_trust_ratio(eps=0.5),
        "lamb": optim.lamb(0.1, weight_decay=0.5, max_coeff=10.0),
        "adafactor": optim.adafactor(min_dim_size_to_factor=2, momentum=0.5),
        "muon": optim.muon(0.02, mask={"a": True, "b": [False, True]}),
        "muon by a function": optim.muon(0.02, mask=wide, adam_learning_rate=1e-3),
        "scale_by_muon": optim.scale_by_muon(ns_steps=3),
        "scale_by_factored_rms": optim.scale_by_factored_rms(epsilon=1e-20),
        "clip_by_block_rms": optim.clip_by_block_rms(0.5),
        "scale_by_param_block_rms": optim.scale_by_param_block_rms(),
        "ema": optim.ema(0.9, accumulator_dtype=torch.float32),
        "ema_params": optim.ema_params(0.9),
        "multi_steps": optim.multi_steps(optim.sgd(0.1), 4),
        "inject_hyperparams": optim.inject_hyperparams(optim.adamw)(0.1, b1=0.8),
        "inject_hyperparams, static": optim.inject_hyperparams(optim.sgd, "momentum")(0.1, 0.9),
        "masked": optim.masked(optim.trace(0.9), {"a": True}),
        "partition": optim.partition(
            {"slow": optim.sgd(0.1), "fast": optim.adam(0.1)}, {"a": "slow", "b": "fast"}
        ),
        "chain": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1, momentum=0.9)),
        "adamw": optim.adamw(schedules.warmup_cosine(3e-4, 10, 100), weight_decay=0.2),
        "masked by a function": optim.adamw(0.1, mask=wide),
        "wsd": optim.sgd(schedules.wsd(0.1, 10, 20, 10)),
        "join": optim.sgd(schedules.join([schedules.constant(0.1), schedules.constant(0.2)], [5])),
    }


@pytest.mark.parametrize("name", make())
def test_equal_by_value(name: str):
    tx, again = make()[name], make()[name]
    assert tx is not again
    assert tx == again
    assert hash(tx) == hash(again)
    assert all(tx != other for other_name, other in make().items() if other_name != name)


@pytest.mark.parametrize("name", make())
def test_pickles(name: str):
    tx = make()[name]
    assert pickle.loads(pickle.dumps(tx)) == tx


@pytest.mark.parametrize(
    "name", sorted(set(make()) - {"masked by a function", "muon by a function"})
)
def test_prints_as_typed(name: str):
    tx = make()[name]
    assert eval(repr(tx), globals() | {"inf": math.inf}) == tx


def test_frozen():
    for tx in make().values():
        field = next(iter(tx.__dataclass_fields__))
        with pytest.raises(AttributeError):
            setattr(tx, field, None)


def test_partition_keeps_its_own_copy():
    parts = {"a": optim.sgd(0.1)}
    tx = optim.partition(parts, "a")
    parts["a"] = optim.sgd(0.2)
    assert tx == optim.partition({"a": optim.sgd(0.1)}, "a")


def test_hyperparameters_are_checked():
    for make_bad, name in (
        (lambda: optim.adam(0.1, b1=1.0), "b1"),
        (lambda: optim.adamw(0.1, b2=-0.1), "b2"),
        (lambda: optim.adamw(0.1, eps=-1.0), "eps"),
        (lambda: optim.sgd(0.1, momentum=-0.5), "decay"),
        (lambda: optim.lion(0.1, b1=1.0), "b1"),
        (lambda: optim.ema(1.0), "decay"),
        (lambda: optim.ema_params(-0.5), "decay"),
        (lambda: optim.ema(0.5, accumulator_dtype=torch.int64), "accumulator_dtype=torch.int64"),
        (lambda: optim.ema_params(0.5, torch.complex64), "accumulator_dtype=torch.complex64"),
        (lambda: optim.multi_steps(optim.sgd(0.1), 0), "every_k_schedule"),
        (lambda: optim.multi_steps(optim.sgd(0.1), 1.5), "every_k_schedule"),
        (lambda: optim.inject_hyperparams(optim.adamw)(0.1, b1=2.0), "b1"),
        (lambda: optim.inject_hyperparams(optim.sgd, "b1"), "b1.*learning_rate"),
        (lambda: optim.lamb(0.1, min_coeff=-1.0), "min_coeff"),
        (lambda: optim.lamb(0.1, min_coeff=2.0, max_coeff=1.0), "max_coeff=1.0 must be at least"),
        (lambda: optim.scale_by_trust_ratio(min_norm=-1.0), "min_norm"),
        (lambda: optim.lion(0.1, b2=-0.1), "b2"),
        (lambda: optim.adagrad(0.1, initial_accumulator_value=-1.0), "initial_accumulator_value"),
        (lambda: optim.adagrad(0.1, eps=0.0), "eps"),
        (lambda: optim.adagrad(0.1, 0.5, eps=-1.0), "eps"),
        (lambda: optim.sgd(0.1, nesterov=True), "nesterov"),
    ):
        with pytest.raises(ValueError, match=name):
            make_bad()


def test_states_are_trees_of_named_tuples():
    params = {"a": torch.ones(2), "b": [torch.ones(2), torch.ones(2)]}
    adam, decay, rate = make()["adamw"].init(params)
    assert adam._fields == ("count", "mu", "nu")
    assert decay == ()
    assert rate._fields == ("count",)
    assert tree.structure(adam.mu) == tree.structure(params)
