"""Ranks whose programs differ: which way they settle on, what is remembered, and failures."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zfunc
import zfunc.resolve
from tests.checker import check, check_same_collectives, collective_sequence
from tests.harness import assert_equal, checked, checked_unions, gathered, planned, ranks
from tests.oracle import Oracle, Sgd
from zfunc import optim
from zfunc.program.ir import Call, Gather, Reduce, Update

RATE = 2.0**-10
NAMES = [f"leaf{i}" for i in range(8)]
NO_UNION = mock.patch.object(zfunc.resolve, "_LONGEST", 0.5)  # entered around all ranks


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randint(-2, 3, (3, 3), generator=generator).double() for n in NAMES}


def loss(p: Any, b: Any) -> Tensor:
    """Reads the leaves that the batch names, in its order; with "look" by way of a value."""
    h = b["x"]
    for name in b["names"]:
        h = (h @ p[name]).clamp(-8, 8)
    if b["look"] and float(h.detach().sum()) < -1e9:
        h = -h
    return h.square().sum()


def batch(rank: int, names: list[str], *, look: bool = False) -> dict[str, Any]:
    x = torch.randint(-2, 3, (2, 3), generator=torch.Generator().manual_seed(rank))
    return {"x": x.double(), "names": tuple(names), "look": look}


def dense(rows: list[Any], steps: int = 1, axes: Any = None) -> list[Tensor]:
    oracle = Oracle(loss, params(), Sgd(RATE), axes=axes or {"shard": len(rows)})
    for _ in range(steps):
        oracle.step([[row] for row in rows])
    return oracle.tensors


@dataclasses.dataclass
class Counting:
    """A communicator that counts exchanges."""

    inner: Any
    exchanges: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Counts and passes on."""
        self.exchanges += 1
        return self.inner.exchange(payload)


def train(mesh: zfunc.Mesh, rows: list[Any], steps: int = 1, **options: Any) -> Any:
    """Whole leaves, the program that ran last, and the exchanges of every step."""
    comm = Counting(mesh.comm)
    step = zfunc.shard(loss, dataclasses.replace(mesh, comm=comm), **options)  # pyright: ignore
    state = step.init(params(), optim.sgd(RATE))
    counts = []
    for _ in range(steps):
        before = comm.exchanges
        state, _ = step(state, rows[mesh.rank])
        counts.append(comm.exchanges - before)
    programs = step._training.programs
    ran = programs.resolved.values()
    return gathered(state.params), (ran[-1].program if ran else None), counts


def gathers(program: Any) -> list[int]:
    """The leaves gathered, in order."""
    return [i for op in program.ops if isinstance(op, Gather) for i in op.leaves]


def reduces(program: Any) -> list[int]:
    """The leaves whose gradients are reduced, in order."""
    return [i for op in program.ops if isinstance(op, Reduce) for i in op.leaves]


def test_ranks_that_differ_little_unite() -> None:
    rows = [batch(0, NAMES[:5]), batch(1, NAMES[1:6]), batch(2, NAMES[:6])]
    results = ranks(3, train, rows)
    for after, program, _ in results:
        assert_equal(after, dense(rows))
        check(program)
        check_same_collectives(program, results[0][1])
        assert sorted(set(gathers(program))) == list(range(6))  # leaves that nobody reads stay


def test_ranks_that_differ_much_gather_everything() -> None:
    """Leaves as large as a bucket, in orders that have little in common: no union is short."""
    rows = [batch(0, NAMES), batch(1, NAMES[::-1]), batch(2, NAMES[4:] + NAMES[:4])]
    large = {name: torch.eye(200).double() for name in NAMES}
    x = torch.ones(1, 200).double()
    oracle = Oracle(loss, large, Sgd(RATE), axes={"shard": 3})
    oracle.step([[row | {"x": x}] for row in rows])

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh)
        state = step.init(large, optim.sgd(RATE))
        state, _ = step(state, rows[mesh.rank] | {"x": x})
        return gathered(state.params), step._training.programs.resolved.values()[-1].program

    results = ranks(3, run)
    for after, program in results:
        assert_equal(after, oracle.tensors)
        check(program)
        check_same_collectives(program, results[0][1])
        assert gathers(program) == list(range(8))


@pytest.mark.parametrize(("allowed", "whole"), [(2.0, False), (1.9, True)])
def test_a_union_may_be_so_much_longer_and_no_more(allowed: float, whole: bool) -> None:
    """Nothing in common: as long as both together, each with the zeros of the other."""
    rows = [("a",), ("b",)]

    def run(mesh: zfunc.Mesh) -> Any:
        apply = zfunc.infer(lambda p, names: p[names[0]].double().sum(), mesh)
        pieces = zfunc.scatter({"a": torch.ones(3), "b": torch.ones(3).double()}, mesh, spec)
        value = apply(pieces, rows[mesh.rank])
        return float(value), apply._programs.agreed.values()[-1].merged

    spec = zfunc.Flat()
    with mock.patch.object(zfunc.resolve, "_LONGEST", allowed):
        results = ranks(2, run)
    for value, merged in results:
        assert value == 3
        assert merged is None if whole else len(merged) == 2


def test_mixed_rungs_gather_everything_in_canonical_order() -> None:
    rows = [batch(0, NAMES[:3]), batch(1, NAMES[2:5], look=True)]
    results = ranks(2, train, rows)
    for rank, (after, program, _) in enumerate(results):
        assert_equal(after, dense(rows))
        check(program)
        check_same_collectives(program, results[0][1])
        assert gathers(program) == list(range(8))
        assert any(isinstance(op, Call) for op in program.ops) == (rank == 1)


@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 3}, {"replica": 2, "shard": 2}], ids=str)
def test_what_ranks_settled_on_is_remembered(axes: Any) -> None:
    """From the second step on: agreement, that all are ready, and status."""
    world = 4 if "replica" in axes else axes["shard"]
    rows = [batch(rank, NAMES[rank : rank + 3]) for rank in range(world)]
    for after, _, counts in ranks(axes, train, rows, 3):
        assert_equal(after, dense(rows, 3, axes))
        assert counts[0] > counts[1] == counts[2] == 3


def taking_turns(mesh: zfunc.Mesh, rounds: int) -> tuple[int, int, list[int]]:
    """Branches and lengths in turn; what ranks settled on, what this rank built, exchanges."""
    comm = Counting(mesh.comm)
    step = zfunc.shard(loss, dataclasses.replace(mesh, comm=comm))  # pyright: ignore
    state = step.init(params(), optim.sgd(0.0))
    counts = []
    for number in range(rounds):
        start = (number >> mesh.rank) % 2
        row = batch(number, NAMES[start : start + 3])
        row["x"] = row["x"].repeat(1 + number % 5, 1)
        before = comm.exchanges
        state, _ = step(state, row)
        counts.append(comm.exchanges - before)
    programs = step._training.programs
    return len(programs.agreed.values()), len(programs.resolved.values()), counts


def test_which_rank_takes_which_branch_is_no_reason_to_settle_again() -> None:
    """Sixteen ways in which four ranks take two branches come down to one union of both."""
    for agreed, built, counts in ranks(4, taking_turns, 48):
        assert agreed == 1
        assert built <= 2 * 5, "one per branch and length of the rank's own"
        assert max(counts[2:]) == 3, "agreement, that all are ready, status"


def test_ranks_that_are_alike_pay_nothing() -> None:
    rows = [batch(0, NAMES), batch(1, NAMES)]
    for _, program, counts in ranks(2, train, rows, 2):
        assert program is None
        assert counts == [2, 2]


def outcome(mesh: zfunc.Mesh, rows: list[Any], **options: Any) -> tuple[str, str, Any]:
    """What a step raises, and the leaves after the next one that is alike."""
    step = zfunc.shard(loss, mesh, **options)
    state = step.init(params(), optim.sgd(RATE))
    raised: Any = ("", "")
    try:
        step(state, rows[mesh.rank])
    except Exception as error:
        raised = type(error).__name__, str(error)
    state, _ = step(state, batch(mesh.rank, NAMES[:2]))
    return *raised, gathered(state.params)


def limited(mesh: zfunc.Mesh, rows: list[Any]) -> Any:
    """With the smallest budget under which each rank's own program fits."""
    needed = 0
    for row in rows:
        step = zfunc.shard(loss, mesh, prefetch=zfunc.Prefetch(live_bytes=1))
        with pytest.raises(zfunc.BudgetError) as refused:
            step.lower(step.init(params(), optim.sgd(RATE)), row)
        needed = max(needed, refused.value.needed_bytes)
    budget = zfunc.Prefetch(live_bytes=needed)
    return outcome(mesh, rows, prefetch=budget)


def test_an_error_everywhere_where_neither_way_fits() -> None:
    rows = [batch(0, NAMES[:4]), batch(1, NAMES[:4][::-1])]
    alike = dense([batch(0, NAMES[:2]), batch(1, NAMES[:2])])
    with NO_UNION:
        results = ranks(2, limited, rows)
    for name, text, after in results:
        assert name == "BudgetError" and text == results[0][1]
        assert "step 0: ranks read different leaves" in text and "live_bytes of at least" in text
        assert_equal(after, alike)


def short_on(mesh: zfunc.Mesh, rows: list[Any], only: int) -> Any:
    """One rank has less memory than what all leaves need whole, and a union is refused."""
    least = 8 * 9 * 8 * 2 + 4 * 72
    budget = zfunc.Prefetch(live_bytes=600 if mesh.rank == only else 2 * least)
    step = zfunc.shard(loss, mesh, prefetch=budget)
    state = step.init(params(), optim.sgd(RATE))
    with pytest.raises(zfunc.BudgetError) as caught:
        step(state, rows[mesh.rank])
    enough = zfunc.Prefetch(live_bytes=caught.value.needed_bytes)
    state, _ = zfunc.shard(loss, mesh, prefetch=enough)(state, rows[mesh.rank])
    return str(caught.value), gathered(state.params)


@pytest.mark.parametrize("only", [0, 2])
def test_a_budget_that_is_short_on_one_rank_is_an_error_everywhere_that_names_it(only: int) -> None:
    rows = [batch(0, NAMES[:2]), batch(1, NAMES[1:3]), batch(2, NAMES[2:4])]
    with NO_UNION:
        results = ranks(3, short_on, rows, only)
    for text, after in results:
        assert f"on rank {only}" in text
        assert_equal(after, dense(rows))


@pytest.mark.parametrize("only", [0, 1])
def test_a_union_that_is_over_the_budget_of_one_rank_is_not_used(only: int) -> None:
    """The program that gathers all is the next best for every rank."""
    rows = [batch(0, NAMES[:4]), batch(1, NAMES[1:5])]
    original = zfunc.resolve._fits

    def fits(program: Any, mesh: zfunc.Mesh) -> bool:
        return mesh.rank != only and original(program, mesh)

    with mock.patch.object(zfunc.resolve, "_fits", fits):
        results = ranks(2, train, rows)
    for after, program, _ in results:
        assert_equal(after, dense(rows))
        check_same_collectives(program, results[0][1])
        assert gathers(program) == list(range(8))


def asking(p: Any, b: Any) -> Tensor:
    """Some ranks sum something over all ranks inside of the loss."""
    total = b["x"].sum() * p["leaf0"].sum()
    if b["asks"]:
        mesh = b["more"].layout.mesh
        summed = zfunc.scatter(p["leaf1"] * b["x"].sum(), mesh, zfunc.P(), reduce="sum")
        total = total + summed.local.sum()
    return total


def asks(mesh: zfunc.Mesh) -> Any:
    step = zfunc.shard(asking, mesh)
    state = step.init(params(), optim.sgd(RATE))
    common = {"x": torch.ones(1), "more": zfunc.scatter(torch.ones(4), mesh, zfunc.Flat())}
    with pytest.raises(zfunc.ProgramMismatchError) as caught:
        step(state, common | {"asks": mesh.rank == 0})
    state, metrics = step(state, common | {"asks": True})
    return str(caught.value), float(metrics["loss"])


def test_collectives_of_the_losses_themselves_must_agree() -> None:
    right = float(params()["leaf0"].sum()) + 2 * float(params()["leaf1"].sum())
    for text, value in ranks(2, asks):
        assert "own collectives differ between ranks" in text
        assert value == right


def asking_between(p: Any, b: Any) -> Tensor:
    """Sums something over all ranks between leaves that ranks read in different orders."""
    first, second = b["names"]
    mesh = b["more"].layout.mesh
    summed = zfunc.scatter((b["x"] @ p[first]).sum(), mesh, zfunc.P(), reduce="sum").local
    return (b["x"] @ p[second]).sum() * summed


def ask_between(mesh: zfunc.Mesh, rows: list[Any]) -> Any:
    step = planned(zfunc.shard(asking_between, mesh), checked(bucket_bytes=0))
    state = step.init(params(), optim.sgd(RATE))
    more = zfunc.scatter(torch.ones(4), mesh, zfunc.Flat())
    _, grads = step.value_and_grad(state.params, rows[mesh.rank] | {"more": more})
    return gathered(grads), step._training.programs.agreed.values()[-1].merged


def test_a_collective_of_the_loss_that_a_union_would_repeat_is_made_once() -> None:
    """Leaves before it on one rank come after it on the other: all leaves are gathered first."""
    rows = [batch(rank, NAMES[:2][:: 1 - 2 * rank]) for rank in range(2)]
    tree = {n: p.requires_grad_() for n, p in params().items()}
    first, second = (
        torch.stack([(row["x"] @ tree[row["names"][at]]).sum() for row in rows]).sum()
        for at in range(2)
    )
    value = first * second / 2
    leaves = [tree[name] for name in NAMES]
    expected = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    with checked_unions(bucket_bytes=0):
        results = ranks(2, ask_between, rows)
    for grads, merged in results:
        assert merged is None
        assert_equal(grads, list(expected))


def taught(p: Any, b: Any) -> Tensor:
    """Some ranks read a teacher that comes in pieces with the batch."""
    h = b["x"] @ p[b["name"]]
    if b["reads"]:
        h = h - b["x"] @ zfunc.gather(b["teacher"])
    return h.square().sum()


def teach(mesh: zfunc.Mesh, accum: int) -> Any:
    teacher = zfunc.scatter(params()["leaf7"] + 1, mesh, zfunc.Flat())
    rows = [row | {"teacher": teacher} for row in taught_rows(mesh.rank, accum)]
    step = zfunc.shard(taught, mesh, accum=accum)
    state = step.init(params(), optim.sgd(RATE))
    for _ in range(2):
        state, _ = step(state, rows if accum > 1 else rows[0])
    with pytest.raises(zfunc.ProgramMismatchError) as caught:
        other = {"teacher": teacher if mesh.rank else params()["leaf7"], "reads": False}
        rows = [row | other | {"name": NAMES[mesh.rank]} for row in rows]
        step(state, rows if accum > 1 else rows[0])
    return gathered(state.params), str(caught.value)


def taught_rows(rank: int, accum: int) -> list[Any]:
    """Which rank reads the teacher, and which leaf, changes with the micro-batch."""
    return [
        {"x": batch(rank + k, [])["x"], "name": NAMES[rank + k], "reads": (rank + k) % 2 == 0}
        for k in range(accum)
    ]


@pytest.mark.parametrize("accum", [1, 2])
def test_pieces_of_other_arguments_are_gathered_for_those_that_read_them(accum: int) -> None:
    def dense_loss(p: Any, b: Any) -> Tensor:
        h = b["x"] @ p[b["name"]]
        return (h - b["x"] @ (params()["leaf7"] + 1) if b["reads"] else h).square().sum()

    oracle = Oracle(dense_loss, params(), Sgd(RATE), axes={"shard": 3})
    for _ in range(2):
        oracle.step([taught_rows(rank, accum) for rank in range(3)])
    for after, text in ranks(3, teach, accum):
        assert_equal(after, oracle.tensors)
        assert "Sharded leaves of other arguments differ" in text


def expert_loss(p: Any, b: Any) -> Tensor:
    h = b["x"] @ p["embed"]
    for number in b["experts"]:
        h = torch.relu(h @ p["experts"][number]).clamp(-8, 8)
    return (h @ p["head"]).square().sum()


def expert_params() -> Any:
    ints = list(params().values())
    return {"embed": ints[0], "experts": [*ints, *(leaf.t() for leaf in ints)], "head": ints[1]}


def experts(mesh: zfunc.Mesh, rows: list[Any]) -> Any:
    """No two leaves travel together."""
    step = planned(zfunc.shard(expert_loss, mesh), checked(bucket_bytes=0))
    state = step.init(expert_params(), optim.sgd(RATE))
    state, _ = step(state, rows[mesh.rank])
    return gathered(state.params), step._training.programs.resolved.values()[-1].program


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_experts_of_their_own_move_every_leaf_once(world: int) -> None:
    """No rank repeats, for its zeros, a reduce that others have had their turn for."""
    own = 8 // world
    rows = [
        batch(rank, []) | {"experts": tuple(range(rank * own, (rank + 1) * own))}
        for rank in range(world)
    ]
    oracle = Oracle(expert_loss, expert_params(), Sgd(RATE), axes={"shard": world})
    oracle.step([[row] for row in rows])
    with checked_unions(bucket_bytes=0):
        results = ranks(world, experts, rows)
    for after, program in results:
        assert_equal(after, oracle.tensors)
        check(program)
        assert sorted(gathers(program)) == sorted(reduces(program)) == [0, *range(1, 9), 17]


def evaluate(mesh: zfunc.Mesh, rows: list[Any]) -> list[float]:
    """Leaves that cannot travel together, some of which only one rank reads, and reads last."""
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    mixed = {n: p.to(d) for (n, p), d in zip(params().items(), dtypes * 3, strict=False)}
    apply = zfunc.infer(lambda p, names: sum((p[n].double().sum() for n in names), 0.0), mesh)
    pieces = zfunc.scatter(mixed, mesh, zfunc.Flat())
    return [float(apply(pieces, rows[mesh.rank])) for _ in range(2)]


@pytest.mark.parametrize("world", [2, 3])
def test_forwards_that_differ_unite(world: int) -> None:
    rows = [tuple(NAMES[: 2 + rank]) for rank in range(world)]
    for row, values in zip(rows, ranks(world, evaluate, rows), strict=True):
        assert values == [float(sum(params()[name].sum() for name in row))] * 2


def test_the_update_of_a_union_lists_every_leaf() -> None:
    rows = [batch(0, NAMES[:2]), batch(1, NAMES[2:3])]
    for _, program, _ in ranks(2, train, rows):
        (update,) = [op for op in program.ops if isinstance(op, Update)]
        assert update.leaves == tuple(range(8))
        assert collective_sequence(program)
