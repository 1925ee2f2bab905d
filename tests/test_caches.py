"""Bounded caches: 300 rounds of other lengths, branches and functions, with nothing left to grow.

A slowdown would be captures, plans or negotiations that never end: those are counted, not seconds.
Values are compared with a dense run all the way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import assert_equal, gathered, ranks
from tests.oracle import Oracle, Sgd
from tests.ranks import run_ranks
from tests.test_stability import live_tensor_bytes
from zfunc import optim

ROUNDS = 300
WARM = 150
RATE = 2.0**-10
BATCH_BYTES = 2 * 4 * 4 * 8  # the two virtual ranks of one process stand at different calls
NAMES = ["a", "b", "c"]


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 4, generator=generator, dtype=torch.float64) / 4 for name in NAMES}


def apply_fn(p: Any, x: Tensor, branch: int) -> Tensor:
    h = torch.tanh(x @ p["a"])
    return h @ p["b"] if branch else torch.relu(h @ p["c"]) @ p["b"]


def loss_fn(p: Any, b: Any) -> Tensor:
    return (apply_fn(p, b["x"], b["branch"]) ** 2).sum()


def batch(rank: int, number: int, *, endless: bool = False) -> dict[str, Any]:
    """Lengths and branches that differ between ranks and rounds; `endless`: rank 0 repeats none."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    length = 1 + int(torch.randint(0, 4, (), generator=generator))
    if endless and rank == 0:
        length = 1 + number
    x = torch.randn(length, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "branch": (number + rank * (number // 7)) % 2}


def generate(p: Any, length: int) -> Tensor:
    """A loop of another length on every rank and in every round."""
    x = torch.ones(1, 4, dtype=torch.float64)
    for _ in range(length):
        x = apply_fn(p, x, 1)
    return x


class Sizes:
    """What the caches of a step and of a forward hold, and what they have done."""

    def __init__(self, step: zfunc.Step, forward: zfunc.Forward):
        self.step, self.forward = step, forward

    def held(self) -> list[int]:
        """Entries that may not outgrow their bounds."""
        programs = [self.step._training.programs, self.forward._programs]
        caches = [cache for p in programs for cache in (p.compiled, p.agreed.values())]
        caches += [p.resolved.values() for p in programs]
        return [*map(len, caches), len(self.step._training.tables), len(self.forward._tables)]

    def done(self) -> tuple[int, ...]:
        """Captures, and programs that ranks had to find together."""
        programs = self.step._training.programs
        misses = self.step.explain().misses, self.forward.explain().misses
        return *misses, len(programs.agreed.values()), len(programs.resolved.values())


def rounds(mesh: zfunc.Mesh, endless: bool) -> Any:
    """Trains, evaluates and generates in turn; what is seen is kept as numbers, not as tensors."""
    capture = zfunc.Capture(max_signatures=16, max_shape_misses=12)
    step = zfunc.shard(loss_fn, mesh, capture=capture)
    forward = zfunc.infer(lambda p, x: apply_fn(p, x, 1), mesh)
    state = step.init(params(), optim.sgd(RATE))
    sizes = Sizes(step, forward)
    seen, marks = [], []
    for number in range(ROUNDS):
        if number in (WARM, ROUNDS - 1):
            marks.append((sizes.done(), live_tensor_bytes()))
        state, metrics = step(state, batch(mesh.rank, number, endless=endless))
        if number % 10 == 0:
            x = torch.ones(1 + (number // 10 + mesh.rank) % 5, 4, dtype=torch.float64)
            out = forward(state.params, x)
            made = generate(zfunc.gather(state.params), 1 + (number + mesh.rank) % 6)
            values = [*gathered(state.params), out, made]
            seen.append((float(metrics["loss"]), [value.tolist() for value in values]))
    return seen, marks, sizes.held(), step.explain().signatures[-1].rung


def expected(world: int, endless: bool) -> list[Any]:
    """Per rank what a dense run gives."""
    oracle = Oracle(loss_fn, params(), Sgd(RATE), axes={"shard": world})
    seen: list[Any] = [[] for _ in range(world)]
    for number in range(ROUNDS):
        result = oracle.step([[batch(rank, number, endless=endless)] for rank in range(world)])
        if number % 10:
            continue
        for rank in range(world):
            x = torch.ones(1 + (number // 10 + rank) % 5, 4, dtype=torch.float64)
            made = generate(oracle.params, 1 + (number + rank) % 6)
            values = [*oracle.tensors, apply_fn(oracle.params, x, 1), made]
            seen[rank].append((result.loss, values))
    return seen


def compare(results: list[Any], endless: bool) -> None:
    for (seen, marks, held, _), wanted in zip(
        results, expected(len(results), endless), strict=True
    ):
        for (loss, values), (right, tensors) in zip(seen, wanted, strict=True):
            assert loss == pytest.approx(right, rel=1e-10)
            assert_equal([torch.tensor(x, dtype=torch.float64) for x in values], tensors, 1e-10)
        (first, before), (last, after) = marks
        assert first == last, "captures and negotiations end"
        assert abs(after - before) <= BATCH_BYTES, "bytes of living tensors"
        assert max(held) <= 64


def test_lengths_branches_and_functions_in_turn_on_processes() -> None:
    compare(run_ranks(2, rounds, False, timeout_s=240), False)


def test_lengths_branches_and_functions_in_turn_on_virtual_ranks() -> None:
    compare(ranks(2, rounds, False), False)


def test_lengths_that_never_repeat_on_one_rank_stall_nobody() -> None:
    """That rank stops tracing and calls its loss as it is; the other keeps its programs."""
    results = run_ranks(2, rounds, True, timeout_s=240)
    compare(results, True)
    assert results[0][3] == "dynamic" and results[1][3] == "traced"
