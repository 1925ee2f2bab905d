"""What policies of `remat` and `tiled` cost and save: the GPT with and without, by turns.

Activations are predicted from the program, and measured as the storages that are alive during each
op of a run performed op by op. The peak of the allocator is that of `value_and_grad` as it runs,
from the profiler. Times are medians of alternating runs, as ratios to the first variant.

    python tests/bench/remat.py [--rounds 10] [--layers 8] [--sequences 4]
        [--budget 30000000]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc
from zfunc import optim, policies, tree
from zfunc.execute import Executor, Inputs

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from eager import peak_bytes
from gpt import GPT, batch, loss_of

TILES = 8


class Tiled(GPT):
    """The GPT with every block under a policy, and its logits in tiles of tokens or vocabulary."""

    def __init__(self, size: dict[str, int], policy: Any, tiles: str):
        super().__init__(**size)
        self.wrap = (lambda block: block) if policy is None else lambda b: zfunc.remat(b, policy)
        self.losses = {"": self.whole, "tokens": self.by_tokens, "vocab": self.by_vocabulary}[tiles]

    def forward(self, batch: Tensor) -> Tensor:
        x, y = batch[:, :-1], batch[:, 1:]
        h = self.emb(x) + self.pos.weight[: x.shape[1]]
        for block in self.blocks:
            h = self.wrap(block)(h)
        return self.losses(self.norm(h).flatten(0, 1), y.flatten()) / y.numel()

    def whole(self, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h), y, reduction="sum")

    def by_tokens(self, h: Tensor, y: Tensor) -> Tensor:
        return zfunc.tiled(self.whole, (0, 0), TILES, out="sum")(h, y)

    def by_vocabulary(self, h: Tensor, y: Tensor) -> Tensor:
        """Each tile sums its exponentials; gradients of the rows of the head need no addition."""

        def part(h: Tensor, rows: Tensor, ids: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = h @ rows.t()
            mine = (ids[0] <= y) & (y <= ids[-1])
            picked = logits.gather(-1, torch.where(mine, y - ids[0], 0)[:, None])[:, 0]
            return logits.logsumexp(-1)[None], (picked * mine)[None]

        tiles = zfunc.tiled(part, (None, 0, 0, None), TILES, out=0)
        sums, picked = tiles(h, self.head.weight, torch.arange(len(self.head.weight)), y)
        return (sums.logsumexp(0) - picked.sum(0)).sum()


def activations(frame: Any, executor: Executor) -> dict[int, int]:
    """The storages that hold activations."""
    values = executor.program.values
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for value, tensor in enumerate(frame.env)
        if isinstance(tensor, Tensor) and values[values[value].owner].role == "activation"
    }


def measured_bytes(lowered: zfunc.Lowered, mesh: zfunc.Mesh, params: Any, tokens: Tensor) -> int:
    """The most bytes of activations during any op of a run."""
    executor = Executor(lowered.program, mesh, max_segment_ops=1)
    leaves = [x.local for x in tree.leaves(params, is_leaf=lambda x: hasattr(x, "local"))]
    frame = executor.bind(Inputs(leaves, [[tokens]], [None], update=lambda grads, verdict: None))
    most, before = 0, {}
    for item in executor.schedule:
        executor.perform(frame, item)
        after = activations(frame, executor)
        most = max(most, sum((before | after).values()))
        before = after
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--budget", type=int, default=30_000_000, help="bytes of the whole loss")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = {"layers": options.layers}
    params = {name: leaf.detach() for name, leaf in GPT(**size).named_parameters()}
    tokens = batch(0, 0, sequences=options.sequences)
    mesh = zfunc.mesh()
    nothing, budget = policies.nothing, policies.budget(options.budget)
    variants: dict[str, tuple[Any, Any, str]] = {
        "none": (None, None, ""),
        "nothing per block": (nothing, None, ""),
        "... logits by tokens": (nothing, None, "tokens"),
        "... logits by vocabulary": (nothing, None, "vocab"),
        "matmuls per block": (policies.matmuls, None, ""),
        "budget": (None, budget, ""),
        "... logits by vocabulary ": (None, budget, "vocab"),
    }
    runs: dict[str, Callable[[], Any]] = {}
    rows: dict[str, list[float]] = {}
    for name, (policy, whole, tiles) in variants.items():
        with torch.device("meta"):
            loss_fn = loss_of(Tiled(size, policy, tiles))
        step = zfunc.shard(loss_fn, mesh, remat=whole)
        state = step.init(params, optim.sgd(0.0))
        lowered = step.lower(state, tokens)
        runs[name] = lambda step=step, state=state: step.value_and_grad(state.params, tokens)
        predicted = lowered.memory_analysis().peak_activation_bytes
        measured = measured_bytes(lowered, mesh, state.params, tokens)
        rows[name] = [predicted, measured, lowered.cost_analysis().compute_s]
    losses = {name: run()[0].item() for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first = next(iter(runs))
    head = f"{'':28s}{'activations':>11s}{'measured':>10s}{'ratio':>7s}{'allocator':>11s}"
    print(head + f"{'time':>9s}{'ratio':>7s}{'model':>7s}  loss")
    for name, run in runs.items():
        predicted, measured, modelled = rows[name]
        print(
            f"{name:28s}{predicted / 1e6:8.1f} MB{measured / 1e6:7.1f} MB"
            f"{measured / rows[first][1]:7.3f}{peak_bytes(run) / 1e6:8.1f} MB"
            f"{medians[name] * 1e3:6.0f} ms{medians[name] / medians[first]:7.2f}"
            f"{modelled / rows[first][2]:7.2f}  {losses[name]:.7f}"
        )


if __name__ == "__main__":
    main()
