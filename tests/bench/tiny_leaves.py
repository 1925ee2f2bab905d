"""1000 leaves of 1 to 16 elements on 2 gloo ranks: messages per step, and time beside plain torch.

python tests/bench/tiny_leaves.py [--leaves 1000]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import zfunc
from zfunc import optim

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from ranks import run_ranks


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for leaf in params.values():
        total = total + torch.tanh(leaf * x[: leaf.shape[0]]).sum()
    return total


def make(leaves: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    sizes = random.Random(0)
    return {f"leaf{i:05d}": torch.randn(sizes.randint(1, 16)) for i in range(leaves)}


def plain_step(leaves: int) -> Callable[[], None]:
    params = {name: leaf.requires_grad_() for name, leaf in make(leaves).items()}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3, fused=True)
    x = torch.randn(16)

    def step() -> None:
        loss_fn(params, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded_step(mesh: zfunc.Mesh, leaves: int) -> Callable[[], None]:
    step = zfunc.shard(loss_fn, mesh)
    box = [step.init(make(leaves), optim.adamw(1e-3))]
    x = torch.randn(16)

    def run() -> None:
        box[0], _ = step(box[0], x)

    return run


def measure(mesh: zfunc.Mesh, leaves: int, rounds: int) -> tuple[float, float, float]:
    """Median seconds of a sharded and of a plain step, alternating; messages of one step."""
    torch.set_num_threads(1)
    sharded, plain = sharded_step(mesh, leaves), plain_step(leaves)
    times: dict[str, list[float]] = {"sharded": [], "plain": []}
    for _ in range(3):
        sharded()
        plain()
    before = mesh.comm.stats().messages
    sharded()
    messages = mesh.comm.stats().messages - before
    for _ in range(rounds):
        for name, run in (("sharded", sharded), ("plain", plain)):
            mesh.comm.exchange(b"")
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return statistics.median(times["sharded"]), statistics.median(times["plain"]), messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    for leaves in (options.leaves // 10, options.leaves):
        sharded, plain, messages = run_ranks(2, measure, leaves, options.rounds, timeout_s=300)[0]
        print(
            f"{leaves:6d} leaves: {messages} messages a step, sharded {sharded * 1e3:.1f} ms,"
            f" plain {plain * 1e3:.1f} ms, ratio {sharded / plain:.2f}"
        )


if __name__ == "__main__":
    main()
