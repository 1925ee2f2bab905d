"""Long runs in which something else happens between steps: each as on one dense process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import assert_equal, gathered, ranks
from tests.hostile.case import RATE, ints
from tests.hostile.trees import forward, mlp, rows
from tests.oracle import Adamw, Oracle, Sgd
from tests.ranks import run_ranks
from zfunc import optim, tree

Everywhere = Callable[..., list[Any]]


def loss_fn(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()


def everywhere(fn: Callable[..., Any]) -> Any:
    """Runs a test on virtual ranks and on processes: `what` calls `fn` on every rank."""
    calls: dict[str, tuple[int, Everywhere]] = {
        "2 virtual ranks": (2, lambda: ranks(2, fn)),
        "3 virtual ranks": (3, lambda: ranks(3, fn)),
        "1 process": (1, lambda: run_ranks(1, fn)),
        "2 processes": (2, lambda: run_ranks(2, fn)),
        "3 processes": (3, lambda: run_ranks(3, fn)),
        "4 processes": (4, lambda: run_ranks(4, fn)),
    }
    return pytest.mark.parametrize(("world", "call"), calls.values(), ids=calls)


def data(world: int, step: int) -> list[list[Any]]:
    return [[rows(rank, step)] for rank in range(world)]


def dense(world: int, **options: Any) -> Oracle:
    return Oracle(loss_fn, mlp(), Sgd(RATE), axes={"shard": world}, **options)


def averaging(mesh: zfunc.Mesh) -> Any:
    step = zfunc.shard(loss_fn, mesh)
    state = step.init(mlp(), optim.sgd(RATE))
    ema = tree.map(torch.clone, state.params)
    for number in range(3):
        state, _ = step(state, rows(mesh.rank, number))
        ema = tree.map(lambda e, p: 0.75 * e + 0.25 * p, ema, state.params)
    return gathered(ema), gathered(state.params)


@everywhere(averaging)
def test_a_moving_average_of_parameters(world: int, call: Everywhere) -> None:
    oracle = dense(world)
    ema = oracle.tensors
    for number in range(3):
        oracle.step(data(world, number))
        ema = [0.75 * e + 0.25 * p for e, p in zip(ema, oracle.tensors, strict=True)]
    for got, params in call():
        assert_equal(got, ema)
        assert_equal(params, oracle.tensors)


def distilling(mesh: zfunc.Mesh) -> Any:
    """The average teaches: it comes with the batch, in pieces, and is gathered in the loss."""

    def loss(p: Any, b: Any) -> Tensor:
        teacher = zfunc.gather(b["teacher"])
        return (forward(p, b["x"]) - forward(teacher, b["x"])).square().sum()

    step = zfunc.shard(loss, mesh)
    state = step.init(mlp(), optim.sgd(RATE))
    ema = tree.map(lambda p: p + 1, state.params)
    for number in range(2):
        state, _ = step(state, rows(mesh.rank, number) | {"teacher": ema})
        ema = tree.map(lambda e, p: 0.75 * e + 0.25 * p, ema, state.params)
    return gathered(state.params)


@everywhere(distilling)
def test_a_teacher_in_pieces_in_the_batch(world: int, call: Everywhere) -> None:
    def loss(p: Any, b: Any) -> Tensor:
        return (forward(p, b["x"]) - forward(b["teacher"], b["x"])).square().sum()

    oracle = Oracle(loss, mlp(), Sgd(RATE), axes={"shard": world})
    ema = {name: leaf + 1 for name, leaf in mlp().items()}
    for number in range(2):
        oracle.step([[rows(rank, number) | {"teacher": ema}] for rank in range(world)])
        ema = {name: 0.75 * e + 0.25 * oracle.params[name] for name, e in ema.items()}
    for got in call():
        assert_equal(got, oracle.tensors)


FROZEN = {"a": False, "b": True, "c": False}


def freezing(mesh: zfunc.Mesh) -> Any:
    """Two steps frozen, two with all leaves, two frozen again."""
    some = zfunc.shard(loss_fn, mesh, trainable=FROZEN)
    all_of_it = zfunc.shard(loss_fn, mesh)
    state = some.init(mlp(), optim.adamw(0.01))
    for number in range(6):
        step = all_of_it if number in (2, 3) else some
        if number in (2, 4):
            state = step.adopt(state)
        state, _ = step(state, rows(mesh.rank, number))
    return gathered(state.params)


@everywhere(freezing)
def test_frozen_then_trained_then_frozen_again(world: int, call: Everywhere) -> None:
    """Each leaf counts its own updates: the moments of a newly trained one start from nothing."""
    oracle = Oracle(loss_fn, mlp(), Adamw(0.01), axes={"shard": world})
    for number in range(6):
        oracle.trainable = [True] * 3 if number in (2, 3) else [False, True, False]
        oracle.step(data(world, number))
    for got in call():
        assert_equal(got, oracle.tensors, 1e-10)


def evaluating(mesh: zfunc.Mesh) -> Any:
    """Between steps every rank evaluates other lengths than it trains on."""
    step = zfunc.shard(loss_fn, mesh)
    apply = zfunc.infer(lambda p, x: forward(p, x), mesh)
    state = step.init(mlp(), optim.sgd(RATE))
    seen = []
    for number in range(3):
        seen.append(apply(state.params, ints(number, 1 + mesh.rank + number, 4)))
        state, _ = step(state, rows(mesh.rank, number))
    return seen, gathered(state.params)


@everywhere(evaluating)
def test_evaluation_between_steps(world: int, call: Everywhere) -> None:
    oracle = dense(world)
    expected: list[list[Tensor]] = [[] for _ in range(world)]
    for number in range(3):
        for rank in range(world):
            x = ints(number, 1 + rank + number, 4)
            expected[rank].append(forward(oracle.params, x))
        oracle.step(data(world, number))
    for (got, params), right in zip(call(), expected, strict=True):
        assert_equal(got, right)
        assert_equal(params, oracle.tensors)


def decode(params: Any, length: int) -> list[int]:
    """Greedy generation, one row of four numbers at a time."""
    x, made = torch.ones(1, 4, dtype=torch.float64), []
    for _ in range(length):
        made.append(int(forward(params, x).argmax()))
        x = torch.nn.functional.one_hot(torch.tensor([made[-1]]), 4).double()
    return made


def generating(mesh: zfunc.Mesh) -> Any:
    step = zfunc.shard(loss_fn, mesh)
    state = step.init(mlp(), optim.sgd(RATE))
    made = []
    for number in range(2):
        state, _ = step(state, rows(mesh.rank, number))
        whole = zfunc.gather(state.params)
        made.append(decode(whole, 1 + 3 * mesh.rank))
    return made, gathered(state.params)


@everywhere(generating)
def test_generation_of_another_length_on_every_rank(world: int, call: Everywhere) -> None:
    oracle = dense(world)
    expected: list[list[list[int]]] = [[] for _ in range(world)]
    for number in range(2):
        oracle.step(data(world, number))
        for rank in range(world):
            expected[rank].append(decode(oracle.params, 1 + 3 * rank))
    for (made, params), right in zip(call(), expected, strict=True):
        assert made == right
        assert_equal(params, oracle.tensors)


def statistics(mesh: zfunc.Mesh) -> Any:
    """Batch-norm statistics leave as aux, are averaged, and come back with the next batch."""

    def loss(p: Any, b: Any) -> Any:
        h = b["x"] @ p["a"]
        mean = h.mean(0)
        running = 0.5 * b["running"] + 0.5 * mean.detach()
        return ((h - mean) @ p["c"]).square().sum() + (h - running).sum(), running

    step = zfunc.shard(loss, mesh, has_aux=True)
    state = step.init(mlp(), optim.sgd(RATE))
    running = torch.zeros(3, dtype=torch.float64)
    for number in range(3):
        batch = rows(mesh.rank, number) | {"running": running}
        state, metrics = step(state, batch)
        running = metrics["aux"]
    return running, gathered(state.params)


@everywhere(statistics)
def test_running_statistics_of_every_rank(world: int, call: Everywhere) -> None:
    def loss(p: Any, b: Any) -> Any:
        h = b["x"] @ p["a"]
        mean = h.mean(0)
        running = 0.5 * b["running"] + 0.5 * mean.detach()
        return ((h - mean) @ p["c"]).square().sum() + (h - running).sum(), running

    oracle = Oracle(loss, mlp(), Sgd(RATE), axes={"shard": world}, has_aux=True)
    running = [torch.zeros(3, dtype=torch.float64)] * world
    for number in range(3):
        batches = [[rows(r, number) | {"running": running[r]}] for r in range(world)]
        running = [aux[0] for aux in oracle.step(batches).aux]
    for (got, params), right in zip(call(), running, strict=True):
        assert_equal([got], [right], 1e-12)
        assert_equal(params, oracle.tensors, 1e-10)


def failing(mesh: zfunc.Mesh) -> Any:
    """The last rank raises at capture, then while it runs; callers catch it and go on."""

    def loss(p: Any, b: Any) -> Tensor:
        if b.get("broken"):
            raise ValueError("the data of this rank are broken")
        h = torch.nn.functional.embedding(b["index"], p["a"])
        return (h @ p["c"]).square().sum()

    step = zfunc.shard(loss, mesh)
    state = step.init(mlp(), optim.sgd(RATE))
    errors = []
    for number in range(4):
        bad = mesh.rank == mesh.size - 1
        batch: dict[str, Any] = {"index": torch.tensor([mesh.rank, number % 4])}
        if bad and number == 1:
            batch["broken"] = True
        if bad and number == 2:
            batch["index"] = torch.tensor([0, 99])
        try:
            state, _ = step(state, batch)
        except (ValueError, IndexError, zfunc.RemoteRankError) as error:
            errors.append((type(error).__name__, str(error).splitlines()[0]))
    return errors, gathered(state.params)


@everywhere(failing)
def test_exceptions_on_one_rank_of_a_caller_who_goes_on(world: int, call: Everywhere) -> None:
    def loss(p: Any, b: Any) -> Tensor:
        return (torch.nn.functional.embedding(b, p["a"]) @ p["c"]).square().sum()

    oracle = Oracle(loss, mlp(), Sgd(RATE), axes={"shard": world})
    for number in (0, 3):
        oracle.step([[torch.tensor([rank, number % 4])] for rank in range(world)])
    for rank, (errors, params) in enumerate(call()):
        first, second = errors
        if rank == world - 1:
            assert first == ("ValueError", "the data of this rank are broken")
            assert second[0] == "IndexError"
        else:
            assert first[0] == second[0] == "RemoteRankError"
            assert (
                f"rank {world - 1}" in first[1] and "the data of this rank are broken" in first[1]
            )
            assert f"rank {world - 1}" in second[1] and "index" in second[1]
        assert_equal(params, oracle.tensors)


def modes(mesh: zfunc.Mesh) -> Any:
    """Calls a step as loops do that have left no-grad, autocast or inference mode on."""
    step = zfunc.shard(loss_fn, mesh)
    state = step.init(mlp(), optim.sgd(RATE))
    seen = []
    for number, mode in enumerate(
        [torch.no_grad(), torch.inference_mode(), torch.enable_grad(), contextlib.nullcontext()]
    ):
        with mode:
            state, metrics = step(state, rows(mesh.rank, number))
        seen.append(float(metrics["loss"]))
    return seen, gathered(state.params)


@everywhere(modes)
def test_steps_inside_of_modes(world: int, call: Everywhere) -> None:
    oracle = dense(world)
    expected = [oracle.step(data(world, number)).loss for number in range(4)]
    for seen, params in call():
        assert seen == expected
        assert_equal(params, oracle.tensors)


def keyed_dropout(mesh: zfunc.Mesh, seed: int) -> Any:
    """With a key in the state, torch's own generator does not count."""

    def loss(p: Any, b: Any) -> Tensor:
        return torch.nn.functional.dropout(forward(p, b["x"]), 0.5).square().sum()

    step = zfunc.shard(loss, mesh)
    state = step.init(mlp(), optim.sgd(0.0), key=zfunc.random.key(3))
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    losses = []
    for _ in range(6):
        state, metrics = step(state, {"x": ints(1, 6, 4)})
        losses.append(float(metrics["loss"]))
    assert torch.equal(torch.get_rng_state(), before)
    return losses


def test_torch_dropout_under_a_key_repeats_and_moves_no_generator() -> None:
    first, again = ranks(2, keyed_dropout, 1), ranks(2, keyed_dropout, 2)
    assert first == again == run_ranks(2, keyed_dropout, 3)
    assert len(set(first[0])) > 1
