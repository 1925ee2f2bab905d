"""Bounded caches: 300 rounds of other lengths, branches and functions, with nothing left to grow.

A slowdown would be captures, plans or negotiations that never end: those are counted, not seconds.
Values are compared with a dense run all the way.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import assert_equal, ranks
from tests.oracle import Oracle, Sgd
from tests.ranks import run_ranks
from tests.test_resolve import Counting
from tests.test_stability import live_tensor_bytes
from zfunc import optim

ROUNDS = 300
FEWER = 100  # where one rank repeats nothing
RATE = 2.0**-10
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


class Watch:
    """What a step and a forward keep, and what each call exchanges with the other ranks."""

    def __init__(self, mesh: zfunc.Mesh, capture: zfunc.Capture):
        self.comm = Counting(mesh.comm)
        mesh = dataclasses.replace(mesh, comm=self.comm)  # pyright: ignore
        self.step = zfunc.shard(loss_fn, mesh, capture=capture)
        self.forward = zfunc.infer(lambda p, x: apply_fn(p, x, 1), mesh)

    def programs(self) -> list[Any]:
        """Every program that is kept; one that is built again is another object."""
        kept = [self.step._training.programs, self.forward._programs]
        return [
            program
            for caches in kept
            for program in (*caches.compiled, *caches.resolved.values(), *caches.agreed.values())
        ]

    def objects(self) -> Counter[str]:
        """Living objects of the library's classes, by class."""
        gc.collect()
        types = [type(thing) for thing in gc.get_objects()]
        return Counter(t.__qualname__ for t in types if str(t.__module__).startswith("zfunc"))


@dataclasses.dataclass
class Seen:
    """What a rank saw: per round the loss and what follows it; at two marks, what it kept."""

    rounds: list[tuple[float, list[Any]]]
    exchanges: list[int]
    rungs: list[str]
    same_programs: bool
    grown_bytes: int
    grown: dict[str, int]
    misses: tuple[int, int]
    num_programs: int


def one_round(
    watch: Watch, state: Any, rank: int, number: int, endless: bool
) -> tuple[Any, tuple[float, list[Any]]]:
    """Trains, evaluates and generates; what is seen is kept as numbers, not as tensors."""
    state, metrics = watch.step(state, batch(rank, number, endless=endless))
    x = torch.ones(1 + (number + rank) % 5, 4, dtype=torch.float64)
    out = watch.forward(state.params, x)
    whole = zfunc.gather(state.params)
    made = generate(whole, 1 + (number + rank) % 6)
    values = [*(whole[name] for name in NAMES), out, made]
    return state, (float(metrics["loss"]), [value.tolist() for value in values])


def rounds(mesh: zfunc.Mesh, endless: bool) -> Seen:
    """300 rounds, and what was kept between two of them."""
    watch = Watch(mesh, zfunc.Capture(max_signatures=16, max_shape_misses=12))
    state = watch.step.init(params(), optim.sgd(RATE))
    seen, exchanges, marks = [], [], []
    last = (FEWER if endless else ROUNDS) - 1
    for number in range(last + 1):
        if number in (last // 2, last):
            marks.append((watch.programs(), live_tensor_bytes(), watch.objects()))
        before = watch.comm.exchanges
        state, values = one_round(watch, state, mesh.rank, number, endless)
        exchanges.append(watch.comm.exchanges - before)
        seen.append(values)
    (first, live, objects), (kept, later, more) = marks
    reports = watch.step.explain(), watch.forward.explain()
    return Seen(
        seen,
        exchanges[last // 2 :],
        [report.rung for report in reports[0].signatures],
        set(map(id, first)) == set(map(id, kept)),
        later - live,
        {name: count for name, count in (more - objects).items() if count > 0},
        (reports[0].misses, reports[1].misses),
        len(kept),
    )


def expected(world: int, endless: bool) -> list[list[tuple[float, list[Tensor]]]]:
    """Per rank what a dense run gives."""
    oracle = Oracle(loss_fn, params(), Sgd(RATE), axes={"shard": world})
    seen: list[Any] = [[] for _ in range(world)]
    for number in range(FEWER if endless else ROUNDS):
        result = oracle.step([[batch(rank, number, endless=endless)] for rank in range(world)])
        for rank in range(world):
            x = torch.ones(1 + (number + rank) % 5, 4, dtype=torch.float64)
            made = generate(oracle.params, 1 + (number + rank) % 6)
            values = [*oracle.tensors, apply_fn(oracle.params, x, 1), made]
            seen[rank].append((result.loss, values))
    return seen


def compare(results: list[Seen], endless: bool, *, alone: bool) -> None:
    """`alone`: whether each rank has a process of its own, so that all it keeps is its own."""
    for seen, wanted in zip(results, expected(len(results), endless), strict=True):
        for (loss, values), (right, tensors) in zip(seen.rounds, wanted, strict=True):
            assert loss == pytest.approx(right, rel=1e-10)
            assert_equal([torch.tensor(x, dtype=torch.float64) for x in values], tensors, 1e-10)
        assert seen.same_programs, "captures, plans and negotiations end"
        # Step: agreement and status, that all are ready if ranks differ, weights if one of them
        # calls its loss. Agreement of a forward and of a gather.
        assert set(seen.exchanges) <= ({4 + 2} if endless else {4, 4 + 1})
        if alone:
            assert seen.grown_bytes == 0, "bytes of living tensors"
            assert not seen.grown, "objects of the library"
        assert seen.num_programs <= 16 + 16 + 2 + 5


def signature(rank: int, number: int) -> tuple[int, int]:
    given = batch(rank, number)
    return given["x"].shape[0], given["branch"]


def test_lengths_branches_and_functions_in_turn_on_processes() -> None:
    results = run_ranks(2, rounds, False, timeout_s=240)
    compare(results, False, alone=True)
    for rank, seen in enumerate(results):
        assert seen.misses == (len({signature(rank, number) for number in range(ROUNDS)}), 5), (
            "each signature is captured once"
        )


def test_lengths_branches_and_functions_in_turn_on_virtual_ranks() -> None:
    compare(ranks(2, rounds, False), False, alone=False)


def test_lengths_that_never_repeat_on_one_rank_stall_nobody() -> None:
    """That rank stops tracing and calls its loss as it is; the other keeps its programs."""
    results = run_ranks(2, rounds, True, timeout_s=240)
    compare(results, True, alone=True)
    endless, other = results
    assert endless.rungs[-1] == "dynamic" and set(other.rungs) == {"traced"}
    assert endless.misses[0] == 12 + 1 and other.misses[0] == len(
        {signature(1, number) for number in range(FEWER)}
    )
