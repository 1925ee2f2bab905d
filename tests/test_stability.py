"""A long run: no byte more in live tensors, no growth of the process, no second capture."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zfunc
from tests.ranks import run_ranks
from zfunc import optim

FIRST, LAST = 50, 300
MOST_GROWTH_BYTES = 1 << 20


def make() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (64, 256), "b": (256, 256), "c": (256, 8), "d": (256,)}
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def apply_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    h = torch.tanh(x @ params["a"])
    return torch.tanh(h @ params["b"] + params["d"]) @ params["c"]


def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return ((apply_fn(params, x) - y) ** 2).mean()


def live_tensor_bytes() -> int:
    """Bytes of the distinct storages of all tensors that Python knows; a wrapper has none."""
    gc.collect()
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    found = {}
    for thing in gc.get_objects():
        if type(thing) is Tensor and thing.layout == torch.strided and not wrapped(thing):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def long_run(mesh: zfunc.Mesh) -> dict[str, Any]:
    """Trains, evaluating every fifth step; what grew between two marks."""
    generator = torch.Generator().manual_seed(mesh.rank)
    x, y = torch.randn(16, 64, generator=generator), torch.randn(16, 8, generator=generator)
    step = zfunc.shard(loss_fn, mesh)
    forward = zfunc.infer(apply_fn, mesh)
    state = step.init(make(), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
    marks: dict[str, list[int]] = {"live": [], "resident": []}
    for number in range(LAST + 1):
        if number in (FIRST, LAST):
            marks["live"].append(live_tensor_bytes())
            marks["resident"].append(resident_bytes())
        state, metrics = step(state, (x, y))
        if number % 5 == 0:
            forward(state.params, x)
    assert torch.isfinite(metrics["loss"])
    growth = {name: last - first for name, (first, last) in marks.items()}
    return growth | {"captures": (step.explain().misses, forward.explain().misses)}


def test_a_long_run_does_not_grow() -> None:
    for grown in run_ranks(2, long_run, timeout_s=120):
        assert grown["live"] == 0
        assert grown["resident"] <= MOST_GROWTH_BYTES
        assert grown["captures"] == (1, 1)
