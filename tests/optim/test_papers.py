"""Optimizers that torch does not have, against their papers' equations in plain float64 torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optim.papers import Adagrad, Lamb, Lion, trained
from tests.optim.test_torch import assert_close, make, ours
from zfunc import optim
from zfunc.optim.muon import orthogonalized

LOCAL = optim.LocalInfo()
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
    txs = optim.lion, optim.adagrad, optim.lamb, optim.adafactor, optim.muon
    for tx in (tx(0.01) for tx in txs):
        after = ours(tx, params, steps, fused=True)
        assert all(x.dtype == torch.bfloat16 for x in after.values())
        assert not torch.equal(after["matrix"], params["matrix"])


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 32)], ids=str)
def test_singular_values_end_where_jordan_says(shape: tuple[int, int]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = torch.linspace(0.02, 1.0, len(s), dtype=torch.float64)
    y = orthogonalized(u @ torch.diag(s / s.norm()) @ v)
    got = u.mT @ y @ v.mT
    assert got.diagonal().min() >= 0.68 and got.diagonal().max() <= 1.14
    assert (got - torch.diag(got.diagonal())).abs().max() <= 1e-12
    assert torch.equal(orthogonalized(torch.zeros(shape)), torch.zeros(shape))


def test_factored_means_take_a_row_and_a_column():
    params = {"cube": torch.ones(3, 200, 130), "low": torch.ones(500, 127), "v": torch.ones(999)}
    state = optim.scale_by_factored_rms().init(params)
    assert state.v_row["cube"].shape == (3, 130) and state.v_col["cube"].shape == (3, 200)
    assert state.v_row["low"] is None and state.v["low"].shape == (500, 127)
    assert state.v["cube"] is None and state.v["v"].shape == (999,)


def test_each_layer_of_a_stack_is_factored_by_itself():
    """The two longest dims are rows and columns; what is stacked along the third is apart."""
    generator = torch.Generator().manual_seed(0)
    cube = torch.randn(4, 2, 5, generator=generator, dtype=torch.float64)
    tx = optim.scale_by_factored_rms(min_dim_size_to_factor=1)
    stacked, _ = tx.update([cube.clone()], tx.init([cube]), [cube], info=LOCAL)
    layers = [layer.contiguous() for layer in cube.unbind(1)]
    alone, _ = tx.update([x.clone() for x in layers], tx.init(layers), layers, info=LOCAL)
    torch.testing.assert_close(stacked[0], torch.stack(alone, 1), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("make_tx", "message"),
    [
        (lambda: optim.scale_by_muon(beta=1.0), "beta=1.0 must be"),
        (lambda: optim.scale_by_muon(adjust="none"), "adjust='none' must be"),  # pyright: ignore
        (lambda: optim.scale_by_muon().init({"b": torch.ones(3)}), r"params\['b'\] is float32 \[3"),
        (lambda: optim.scale_by_factored_rms(decay_rate=0.0), "decay_rate=0.0 must be"),
        (lambda: optim.clip_by_block_rms(0.0), "threshold=0.0 must be"),
        (lambda: optim.scale_by_param_block_rms(-1.0), "min_scale=-1.0 must be"),
    ],
)
def test_wrong_arguments(make_tx: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make_tx()
