"""What agreement and status cost a step: the same step with and without their exchanges.

python tests/bench/agreement.py [--leaves 24] [--rounds 300]

Two gloo ranks, one thread each. Every other step answers the exchanges of the control group itself,
as if the other rank had sent the same; gathers and reduces remain. The difference of the medians is
what a step pays for waiting. Beside it, per step: the time inside of the exchanges, and that of
what a rank computes for them, hashing and parsing and the sums of the status.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import zfunc
from zfunc import optim, training
from zfunc.execute import status
from zfunc.meshes import Comm

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from ranks import run_ranks

WARM_UP = 10


class Alone:
    """A communicator that can answer an exchange for the other ranks."""

    def __init__(self, inner: Comm, size: int):
        self.inner = inner
        self.size = size
        self.real = True
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Gives every rank all payloads, or this rank its own as if it were everybody's."""
        if not self.real:
            return [payload] * self.size
        started = time.perf_counter()
        rows = self.inner.exchange(payload)
        self.seconds += time.perf_counter() - started
        return rows


@contextlib.contextmanager
def timed(owner: Any, names: list[str], spent: list[float]) -> Iterator[None]:
    """Adds the seconds that some functions take to the last number of a list."""

    def timing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[-1] += time.perf_counter() - started

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(owner, name, timing(getattr(owner, name))))
        yield


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    for leaf in params.values():
        x = torch.tanh(x @ leaf)
    return x.square().mean()


def measure(mesh: zfunc.Mesh, leaves: int, rounds: int) -> dict[str, float]:
    """Median milliseconds per step."""
    torch.set_num_threads(1)
    assert mesh.comm is not None
    comm = Alone(mesh.comm, mesh.size)
    step = zfunc.shard(loss_fn, dataclasses.replace(mesh, comm=comm))
    params = {f"leaf{i:03d}": torch.randn(64, 64) / 8 for i in range(leaves)}
    state = step.init(params, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
    x = torch.randn(16, 64)
    seen: dict[str, list[float]] = {"real": [], "alone": [], "inside": [], "own": []}
    own: list[float] = [0.0]
    with timed(training, ["_proposal"], own), timed(status, ["report", "agree"], own):
        for number in range(2 * (rounds + WARM_UP)):
            comm.real = number % 2 == 0
            mesh.comm.exchange(b"")
            comm.seconds, own[-1] = 0.0, 0.0
            started = time.perf_counter()
            state, _ = step(state, x)
            seconds = time.perf_counter() - started
            if number < 2 * WARM_UP:
                continue
            seen["real" if comm.real else "alone"].append(seconds)
            if comm.real:
                seen["inside"].append(comm.seconds)
            else:
                seen["own"].append(own[-1])
    return {name: 1e3 * statistics.median(values) for name, values in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    for rank, ms in enumerate(run_ranks(2, measure, options.leaves, options.rounds, timeout_s=300)):
        print(
            f"rank {rank}: step {ms['real']:.2f} ms, without exchanges {ms['alone']:.2f} ms, "
            f"difference {ms['real'] - ms['alone']:.2f} ms; inside of the exchanges "
            f"{ms['inside']:.2f} ms, computed for them {ms['own']:.2f} ms"
        )


if __name__ == "__main__":
    main()
