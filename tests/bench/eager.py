"""`value_and_grad` on a mesh of one beside eager `torch.func.grad_and_value`: time, peak memory.

The peak is the sum of the profiler's memory events: what the CPU allocator held at most above what
it held before the call.

    python tests/bench/eager.py [--rounds 10]
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
from torch.profiler import ProfilerActivity, profile

import zfunc

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpt import GPT, batch, loss_of


def peak_bytes(run: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run()
    del kept
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = {"vocab": 1024, "width": 256, "layers": 6, "heads": 4, "tokens": 128}
    params = {name: leaf.detach() for name, leaf in GPT(**size).named_parameters()}
    with torch.device("meta"):
        loss_fn = loss_of(GPT(**size))
    tokens = batch(0, 0, vocab=1024)
    mesh = zfunc.mesh()
    sharded = zfunc.scatter(params, mesh, zfunc.Flat())
    step = zfunc.shard(loss_fn, mesh)
    eager = torch.func.grad_and_value(loss_fn)
    runs = {
        "zfunc": lambda: step.value_and_grad(sharded, tokens),
        "torch.func": lambda: eager(params, tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    peaks = {name: peak_bytes(run) for name, run in runs.items()}
    for name in runs:
        print(f"{name:10s} {medians[name] * 1e3:8.1f} ms  peak {peaks[name] / 1e6:8.1f} MB")
    ratios = [values["zfunc"] / values["torch.func"] for values in (medians, peaks)]
    print(f"ratio      {ratios[0]:8.2f}     peak {ratios[1]:8.2f}")


if __name__ == "__main__":
    main()
