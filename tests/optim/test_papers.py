"""Optimizers that torch does not have, against their papers' equations in plain float64 torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.test_torch import assert_close, make, ours
from zfunc import optim

BOTH = pytest.mark.parametrize("fused", [True, False], ids=["apply", "update"])


def by_lion(params: Any, steps: list[Any], lr: float, b1: float, b2: float, decay: float) -> Any:
    """Chen et al. 2023, algorithm 2, one leaf after the other."""
    after = {}
    for name, start in params.items():
        theta, m = start.clone(), torch.zeros_like(start)
        for grads in steps:
            g = grads[name]
            c = b1 * m + (1 - b1) * g
            theta = theta - lr * (signs(c) + decay * theta)
            m = b2 * m + (1 - b2) * g
        after[name] = theta
    return after


def signs(x: Tensor) -> Tensor:
    """1, 0 or -1 for every real number, for both parts of a complex one."""
    if x.is_complex():
        return torch.complex(signs(x.real), signs(x.imag))
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_lion_follows_its_paper(dtype: torch.dtype, fused: bool):
    params, steps = make(dtype)
    for lr, b1, b2, decay in ((0.01, 0.9, 0.99, 1e-3), (0.1, 0.5, 0.75, 0.5)):
        got = ours(optim.lion(lr, b1, b2, decay), params, steps, fused=fused)
        assert_close(got, by_lion(params, steps, lr, b1, b2, decay))


def test_lion_has_half_of_adams_memory():
    params, _ = make()
    (mean,) = optim.scale_by_lion().init(params)
    assert {name: x.shape for name, x in mean.items()} == {n: x.shape for n, x in params.items()}


def test_low_precision_keeps_its_dtype():
    params, steps = make(torch.bfloat16)
    for tx in (optim.lion(0.01), optim.adagrad(0.01)):
        after = ours(tx, params, steps, fused=True)
        assert all(x.dtype == torch.bfloat16 for x in after.values())
        assert not torch.equal(after["matrix"], params["matrix"])
