"""On a CUDA device: the same steps as on the CPU. One short script: `pytest tests/gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc
from zfunc import optim, tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]

STEPS = 5


def make() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (32, 64), "b": (64, 64), "c": (64, 8), "d": (64,)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1
        for name, shape in shapes.items()
    }


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    @zfunc.remat
    def block(h: Tensor) -> Tensor:
        return F.gelu(h @ params["b"] + params["d"])

    return (block(F.gelu(x @ params["a"])) @ params["c"]).square().mean()


def train(device: str) -> tuple[list[float], list[Any]]:
    mesh = zfunc.mesh(device=device)
    tx = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))
    step = zfunc.shard(loss_fn, mesh)
    state = step.init(make(), tx)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, x.to(device))
        losses.append(float(metrics["loss"]))
    return losses, [leaf.cpu() for leaf in tree.leaves(zfunc.gather(state.params))]


def test_a_gpu_trains_like_the_cpu() -> None:
    (expected, params), (losses, found) = train("cpu"), train("cuda")
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    for a, b in zip(found, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
