"""Bounded caches: 300 rounds of other lengths, branches and functions, with nothing left to grow.

A slowdown would be captures, plans or negotiations that never end: those are counted, not seconds.
Values are compared with a dense run all the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
import zfunc.programs
from tests.harness import assert_equal, gathered, ranks
from tests.oracle import Oracle, Sgd
from tests.ranks import run_ranks
from tests.test_resolve import Counting
from tests.test_stability import live_tensor_bytes
from zfunc import optim
from zfunc.programs import Bounded

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


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_what_was_used_longest_ago_is_forgotten(size: int, calls: list[tuple[bool, int]]) -> None:
    cache, order = Bounded[int, int](size), list[int]()
    for at, (puts, key) in enumerate(calls):
        if puts:
            cache.put(key, at)
        else:
            found = cache.get(key)
            assert (found is not None) == (key in order[-size:])
        if puts or key in order[-size:]:
            order = [*(other for other in order if other != key), key]
        assert len(cache.values()) == len(order[-size:])


def in_turn(mesh: zfunc.Mesh, turns: list[list[tuple[int, int]]], sizes: list[int]) -> Any:
    """Steps in which rank `r` has the length and branch `turn[r]`; what is kept, built, asked."""
    comm = Counting(mesh.comm)
    capture = zfunc.Capture(max_signatures=sizes[mesh.rank], max_shape_misses=10_000)
    step = zfunc.shard(loss_fn, dataclasses.replace(mesh, comm=comm), capture=capture)  # pyright: ignore
    state = step.init(params(), optim.sgd(RATE))
    programs, exchanges = step._training.programs, []
    for turn in turns:
        before = comm.exchanges
        state, _ = step(state, row(mesh.rank, *turn[mesh.rank]))
        exchanges.append(comm.exchanges - before)
        kept = [len(programs.compiled), len(programs.resolved.values())]
        assert max(*kept, len(programs._captured.values())) <= sizes[mesh.rank]
    return gathered(state.params), programs.misses, exchanges


def row(rank: int, length: int, branch: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * rank + length)
    x = torch.randn(length, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "branch": branch}


def dense_in_turn(turns: list[list[tuple[int, int]]]) -> list[Tensor]:
    world = len(turns[0])
    oracle = Oracle(loss_fn, params(), Sgd(RATE), axes={"shard": world})
    for turn in turns:
        oracle.step([[row(rank, *turn[rank])] for rank in range(world)])
    return oracle.tensors


def test_a_rank_with_a_smaller_cache_captures_again_and_stalls_nobody() -> None:
    """Rank 1 keeps one program: it builds its own again and what was agreed on, every time."""
    turns = [[(1 + at % 3, at % 2), (1 + at % 2, (at // 2) % 2)] for at in range(24)]
    results = ranks(2, in_turn, turns, [64, 1])
    for after, _, exchanges in results:
        assert_equal(after, dense_in_turn(turns), 1e-12)
        assert max(exchanges[4:]) == 3, "agreement, that all are ready, status"
    assert results[0][1] == len({turn[0] for turn in turns})
    assert results[1][1] == 1 + sum(a[1] != b[1] for a, b in itertools.pairwise(turns))


def test_ranks_forget_what_they_settled_on_alike() -> None:
    """Fewer are remembered than there are: it is settled again, with the same values."""
    kinds = [[(1, 0), (1, 1), (1, 1)], [(1, 0), (1, 0), (1, 1)], [(2, 1), (1, 0), (1, 1)]]
    turns = [kinds[at // 3 % 3] if at % 2 else kinds[0] for at in range(18)]
    with mock.patch.object(zfunc.programs, "_MAX_AGREED", 1):
        results = ranks(3, in_turn, turns, [64, 1, 2])
    for after, _, exchanges in results:
        assert_equal(after, dense_in_turn(turns), 1e-12)
        assert exchanges == results[0][2]


def looks(p: Any, x: Tensor) -> Any:
    """Python looks at a value, so that it is noted that this is called as it is."""
    total = sum((x @ p[name]).sum() for name in sorted(p))
    return total if float(total.detach()) > -1e9 else -total  # pyright: ignore


def many_structures(mesh: zfunc.Mesh, count: int) -> list[int]:
    """Gradients and a forward at parameters of ever another structure; what is kept of them."""
    step, forward = zfunc.shard(looks, mesh), zfunc.infer(looks, mesh)
    x = torch.ones(2, 4, dtype=torch.float64)
    states = []
    for number in range(count):
        states.append(step.init({f"leaf{number}": params()["a"]}, optim.sgd(0.0)))
        for state in (states[-1], states[0]):
            value, grads = step.value_and_grad(state.params, x)
            assert value == forward(state.params, x)
            assert_equal(gathered(grads), [torch.full((4, 4), 2.0, dtype=torch.float64)])
        states = [step(state, x)[0] for state in states]
    notes = []
    for tables, programs in (
        (step._training.tables, step._training.programs),
        (forward._tables, forward._programs),
    ):
        notes += [len(tables), len(programs._calls), len(programs._dynamic)]
    return notes


def test_notes_of_structures_are_bounded() -> None:
    """Also those of states whose tables were forgotten, and which go on."""
    with contextlib.ExitStack() as patched:
        for name, bound in (("training", "_MAX_TABLES"), ("spmd", "_MAX_TABLES")):
            module = importlib.import_module(f"zfunc.{name}")
            patched.enter_context(mock.patch.object(module, bound, 3))
        patched.enter_context(mock.patch.object(zfunc.programs, "_MAX_NOTED", 4))
        for notes in ranks(2, many_structures, 8):
            assert max(notes) <= 4


def endless(mesh: zfunc.Mesh) -> Any:
    """A forward whose lengths never repeat on rank 0; one with a collective of its own."""
    capture = zfunc.Capture(max_signatures=4, max_shape_misses=5)
    teacher = zfunc.scatter(params()["c"], mesh, zfunc.Flat())
    forward = zfunc.infer(lambda p, x: apply_fn(p, x, 1), mesh)
    distil = zfunc.shard(lambda p, b: (b[0] @ (p["a"] - zfunc.gather(b[1]))).square().sum(), mesh)
    for programs in (forward._programs, distil._training.programs):
        programs.capture = capture
    pieces = zfunc.scatter(params(), mesh, zfunc.Flat())
    outs = []
    for number in range(12):
        x = torch.ones(1 + number if mesh.rank == 0 else 2, 4, dtype=torch.float64)
        loss, _ = distil.value_and_grad(pieces, (x, teacher))
        outs.append((forward(pieces, x), loss))
    reports = forward.explain(), distil.explain()
    return outs, [(report.signatures[-1].rung, report.misses) for report in reports]


def test_lengths_that_never_repeat_in_a_forward_and_with_collectives() -> None:
    """The forward is called as it is; a loss that communicates is traced for every length."""
    (first, said), (second, quiet) = ranks(2, endless)
    p = params()
    for number, pair in enumerate(zip(first, second, strict=True)):
        xs = [torch.ones(length, 4, dtype=torch.float64) for length in (1 + number, 2)]
        loss = sum((x @ (p["a"] - p["c"])).square().sum() for x in xs) / 2
        for (out, value), x in zip(pair, xs, strict=True):
            assert_equal([out], [apply_fn(p, x, 1)], 1e-12)
            assert float(value) == pytest.approx(float(loss), rel=1e-12)
    assert said == [("dynamic", 5 + 1), ("traced", 12)]
    assert quiet == [("traced", 1), ("traced", 1)]
