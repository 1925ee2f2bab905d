"""Optimizers that torch does not have, against their papers' equations in plain float64 torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optim.papers import Adagrad, Lamb, Lion, trained
from tests.optim.test_torch import assert_close, make, ours
from zfunc import optim

BOTH = pytest.mark.parametrize("fused", [True, False], ids=["apply", "update"])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_lion_follows_its_paper(dtype: torch.dtype, fused: bool):
    params, steps = make(dtype)
    for lr, b1, b2, decay in ((0.01, 0.9, 0.99, 1e-3), (0.1, 0.5, 0.75, 0.5)):
        got = ours(optim.lion(lr, b1, b2, decay), params, steps, fused=fused)
        assert_close(got, trained(Lion(lr, b1, b2, decay), params, steps))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_adagrad_follows_its_paper(dtype: torch.dtype, fused: bool):
    params, steps = make(dtype)
    got = ours(optim.adagrad(0.1, 0.5, 1e-3), params, steps, fused=fused)
    assert_close(got, trained(Adagrad(0.1, 0.5, 1e-3), params, steps))


def test_lion_has_half_of_adams_memory():
    params, _ = make()
    (mean,) = optim.scale_by_lion().init(params)
    assert {name: x.shape for name, x in mean.items()} == {n: x.shape for n, x in params.items()}


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_lamb_follows_its_paper(dtype: torch.dtype, fused: bool):
    params, steps = make(dtype)
    free = (0.0, float("inf"))
    for lr, decay, eps, bounds in ((0.01, 0.0, 1e-6, free), (0.1, 0.3, 1e-3, (0.9, 1.1))):
        tx = optim.lamb(lr, eps=eps, weight_decay=decay, min_coeff=bounds[0], max_coeff=bounds[1])
        expected = trained(Lamb(lr, decay, eps, *bounds), params, steps)
        assert_close(ours(tx, params, steps, fused=fused), expected)


def test_the_bounds_of_the_ratio_bind():
    params, steps = make()
    bounded = trained(Lamb(0.1, 0.3, 1e-3, 0.9, 1.1), params, steps)
    free = trained(Lamb(0.1, 0.3, 1e-3), params, steps)
    assert all(not torch.equal(bounded[name], free[name]) for name in ("matrix", "number"))


@pytest.mark.parametrize(
    ("tx", "param", "grad", "expected"),
    [
        (optim.scale_by_trust_ratio(), [6.0, 8.0], [0.0, 5.0], [0.0, 10.0]),
        (optim.scale_by_trust_ratio(trust_coefficient=0.5), [6.0, 8.0], [3.0, 4.0], [3.0, 4.0]),
        (optim.scale_by_trust_ratio(eps=3.0), [6.0, 8.0], [0.0, 2.0], [0.0, 4.0]),
        (optim.scale_by_trust_ratio(), [0.0, 0.0], [3.0, 4.0], [3.0, 4.0]),
        (optim.scale_by_trust_ratio(), [3.0, 4.0], [0.0, 0.0], [0.0, 0.0]),
        (optim.scale_by_trust_ratio(min_norm=10.0), [0.0, 0.0], [12.0, 16.0], [6.0, 8.0]),
        (optim.scale_by_trust_ratio(min_norm=10.0), [12.0, 16.0], [3.0, 4.0], [6.0, 8.0]),
        (optim.scale_by_trust_ratio(max_coeff=1.5), [6.0, 8.0], [3.0, 4.0], [4.5, 6.0]),
        (optim.scale_by_trust_ratio(min_coeff=4.0), [6.0, 8.0], [3.0, 4.0], [12.0, 16.0]),
        (optim.scale_by_trust_ratio(min_coeff=4.0), [0.0, 0.0], [3.0, 4.0], [3.0, 4.0]),
    ],
)
def test_trust_ratios(tx: Any, param: Any, grad: Any, expected: Any):
    params, updates = {"a": torch.tensor(param)}, {"a": torch.tensor(grad)}
    got, state = tx.update(updates, tx.init(params), params, info=optim.LocalInfo())
    assert state == ()
    assert torch.equal(got["a"], torch.tensor(expected))


def test_trust_ratios_are_per_leaf_and_hand_nan_on():
    params = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0]), "c": None}
    updates = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([float("nan")]), "c": None}
    tx = optim.scale_by_trust_ratio()
    got, _ = tx.update(updates, (), params, info=optim.LocalInfo())
    assert torch.equal(got["a"], torch.tensor([5.0, 0.0]))
    assert got["b"].isnan() and got["c"] is None
    empty, _ = tx.update({"c": None}, (), {"c": None}, info=optim.LocalInfo())
    assert empty == {"c": None}


def test_low_precision_keeps_its_dtype():
    params, steps = make(torch.bfloat16)
    for tx in (optim.lion(0.01), optim.adagrad(0.01), optim.lamb(0.01)):
        after = ours(tx, params, steps, fused=True)
        assert all(x.dtype == torch.bfloat16 for x in after.values())
        assert not torch.equal(after["matrix"], params["matrix"])
