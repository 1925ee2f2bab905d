"""union: one sequence of collectives for ranks whose programs differ, and no more than it needs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.checker import check, check_same_collectives, live_bytes
from tests.harness import assert_equal, checked, checked_unions, examples, gathered, planned, ranks
from tests.oracle import Oracle
from tests.programs import capture
from zfunc import optim
from zfunc.passes import stages
from zfunc.passes.buckets import first_uses
from zfunc.passes.union import (
    Unit,
    grads_done,
    merge,
    merge_all,
    merge_units,
    units,
    with_ghosts,
    with_weight,
    with_zero_grads,
)
from zfunc.program.digest import digest
from zfunc.program.ir import Accumulate, Compute, Free, Gather, Program, Reduce, writes

SHORT = st.lists(st.integers(0, 2), max_size=4)
AXES = st.sampled_from([{"shard": 2}, {"shard": 3}, {"replica": 2, "shard": 2}])


def contains(long: Sequence[Any], short: Sequence[Any]) -> bool:
    """Whether `short` is what remains of `long` when some of it is left out."""
    rest = iter(long)
    return all(any(item == other for other in rest) for item in short)


def shortest(a: list[int], b: list[int]) -> int:
    """The length of a shortest common supersequence, by trying all sequences."""
    for length in itertools.count(max(len(a), len(b))):
        for word in itertools.product(sorted({*a, *b}), repeat=length):
            if contains(word, a) and contains(word, b):
                return length
    raise AssertionError


@given(SHORT, SHORT)
def test_two_sequences_merge_to_a_shortest_one(a: list[int], b: list[int]) -> None:
    merged = merge(a, b)
    assert contains(merged, a) and contains(merged, b)
    assert len(merged) == shortest(a, b)
    assert merged == merge(list(a), tuple(b))


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=5))
def test_many_sequences_merge_to_one_that_contains_each(sequences: list[list[int]]) -> None:
    merged = merge_all(sequences)
    assert all(contains(merged, sequence) for sequence in sequences)
    assert max(map(len, sequences), default=0) <= len(merged) <= sum(map(len, sequences))
    assert merge_all([*sequences, *sequences]) == merged, "who comes again adds nothing"


@given(st.lists(st.integers(0, 4), max_size=8), st.data())
def test_a_part_of_a_sequence_adds_nothing(whole: list[int], data: Any) -> None:
    part = [item for item in whole if data.draw(st.booleans())]
    assert merge(whole, part) == merge(part, whole) == whole


class Counted(int):
    """A number that counts its comparisons."""

    seen = 0

    def __eq__(self, other: object) -> bool:
        Counted.seen += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_a_difference_in_one_place_costs_no_more_than_reading_both() -> None:
    head, tail = range(0, 1000), range(2000, 3000)
    one, other = ([Counted(item) for item in [*head, *part, *tail]] for part in ([5, 6], [6, 7]))
    Counted.seen = 0
    merged, seen = merge(one, other), Counted.seen
    assert merged == [*head, 5, 6, 7, *tail]
    assert seen < 3 * len(one), "a table of all pairs would take len(one) ** 2"


def test_where_either_may_come_first_the_smaller_does() -> None:
    gathers = [Unit("gather", (leaf,), "shard") for leaf in range(3)]
    assert merge(gathers[2:], gathers[:1]) == merge(gathers[:1], gathers[2:])
    assert merge(gathers[2:], gathers[:1]) == [gathers[0], gathers[2]]


PARAMS = {name: torch.ones(4, 4) for name in "abcdef"}
NAMES = st.lists(st.sampled_from(sorted(PARAMS)), min_size=1, max_size=5)


def chain(names: Sequence[str]) -> Any:
    """A loss that reads leaves in an order, and again in backward in the reverse order."""

    def loss(params: Any, x: Tensor) -> Tensor:
        for name in names:
            x = torch.relu(x @ params[name])
        return (x**2).sum()

    return loss


def captured(names: Sequence[str], axes: Any = None) -> tuple[Program, zfunc.Mesh]:
    return capture(chain(names), PARAMS, torch.ones(2, 4), axes=axes)


def packed(micros: list[Program], mesh: zfunc.Mesh, **options: Any) -> Program:
    return dict(stages(micros, mesh, bucket_bytes=0, **options))["pack"]


def least(micros: list[Program], mesh: zfunc.Mesh, **options: Any) -> int:
    """The smallest feasible budget."""
    with pytest.raises(zfunc.BudgetError) as refused:
        packed(micros, mesh, live_bytes=0, **options)
    return refused.value.needed_bytes


@st.composite
def uses(draw: Any) -> list[list[list[str]]]:
    """The leaves that each micro-batch of each rank reads, in order."""
    micros, world = draw(st.integers(1, 2)), draw(st.integers(2, 3))
    return [[draw(NAMES) for _ in range(micros)] for _ in range(world)]


@examples(0.1)
@given(uses(), AXES, st.booleans(), st.booleans())
def test_every_rank_gets_the_same_collectives_and_keeps_its_computation(
    reads: list[list[list[str]]], axes: Any, update: bool, tight: bool
) -> None:
    made = [[captured(names, axes)[0] for names in rank] for rank in reads]
    mesh = zfunc.abstract_mesh(axes)
    used = merge_all([sorted(grads_of(micro)) for rank in made for micro in rank])
    used = list(dict.fromkeys(used))
    micros = [[with_zero_grads(micro, used) for micro in rank] for rank in made]
    order = list(dict.fromkeys(merge_all([first_uses(m.leaves, m.ops, {}) for (m, *_) in micros])))
    order += [leaf for leaf in used if leaf not in order]
    options: dict[str, Any] = {"update": update, "leaf_order": order, "grad_order": used}
    if tight:
        options["live_bytes"] = max(least(rank, mesh, **options) for rank in micros)
    own = [packed(rank, mesh, **options) for rank in micros]
    merged = merge_units([units(program) for program in own])
    programs = [with_ghosts(program, merged) for program in own]
    for program, alone, before in zip(programs, own, made, strict=True):
        check(program, before=before, united=True, budget_bytes=max(live_bytes(program)))
        check_same_collectives(program, programs[0])
        assert digest(program) == digest(programs[0])
        assert [unit.leaves for unit in units(program)] == [unit.leaves for unit in merged]
        assert contains(program.ops, alone.ops), "nothing of its own is lost or moved"
        moved = {i for op in program.ops if isinstance(op, Gather | Reduce) for i in op.leaves}
        assert moved == set(used), "what no rank reads is not communicated"


def grads_of(micro: Program) -> list[int]:
    return [i for i, grad in enumerate(micro.micros[0].grads) if grad is not None]


@examples(0.1)
@given(st.lists(NAMES, min_size=2, max_size=4))
def test_forward_programs_end_with_what_only_others_read(reads: list[list[str]]) -> None:
    mesh = zfunc.abstract_mesh({"shard": 2})
    forward = zfunc.infer(lambda p, x, names: chain(names)(p, x), mesh)
    state = zfunc.shard(chain("a"), mesh).abstract(PARAMS, optim.sgd(0.1))
    own = []
    for names in reads:
        forward.lower(state.params, torch.ones(2, 4), tuple(names))
        own.append(packed(list(forward._programs.compiled[-1].micros), mesh, update=False))
    merged = merge_units([units(program) for program in own])
    for program in (with_ghosts(one, merged) for one in own):
        check(program)
        assert units(program) == merged


def test_what_only_others_read_is_a_copy_that_is_dropped_at_once() -> None:
    (one, mesh), (other, _) = captured("ab"), captured("b")
    one, other = (with_zero_grads(micro, (1, 0)) for micro in (one, other))
    options: dict[str, Any] = {"update": True, "leaf_order": (0, 1), "grad_order": (1, 0)}
    ours, theirs = (packed([micro], mesh, **options) for micro in (one, other))
    program = with_ghosts(theirs, merge_units([units(ours), units(theirs)]))
    check(program)
    gathers = [i for i, op in enumerate(program.ops) if isinstance(op, Gather)]
    (first, _, freed) = program.ops[gathers[0] : gathers[0] + 3]
    assert isinstance(first, Gather) and first.leaves == (0,)
    assert isinstance(freed, Free) and writes(first) == freed.values


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_gradients_wait_for_their_turn_in_every_micro_batch(order: tuple[int, ...]) -> None:
    (one, mesh), (other, _) = captured("abc"), captured("cb")
    micros = [with_zero_grads(micro, order) for micro in (one, other)]
    program = packed(micros, mesh, update=True, leaf_order=(0, 1, 2), grad_order=order)
    check(program, before=[one, other], united=True)
    reduced = [op.leaves for op in program.ops if isinstance(op, Reduce)]
    assert reduced == [(leaf,) for leaf in order] * 2
    sums = [op for op in program.ops if isinstance(op, Accumulate)]
    assert len(sums) == 3, "the second micro-batch is added to the first"


def test_reduces_are_common_and_gathers_between_them_merge() -> None:
    def sequence(text: str) -> list[Unit]:
        kinds = {True: "gather", False: "reduce"}
        return [Unit(kinds[letter.islower()], (ord(letter),), "shard") for letter in text]

    assert merge_units([sequence("abXcY"), sequence("bXY"), sequence("aXdY")]) == sequence("abXcdY")
    assert merge_units([sequence("aXb"), sequence("bXa")]) == sequence("abXab")
    with pytest.raises(AssertionError):
        merge_units([sequence("aXY"), sequence("aYX")])


def test_zero_gradients_are_given_to_those_that_have_none() -> None:
    micro, _ = captured("bd")
    assert grads_of(micro) == [1, 3]
    filled = with_zero_grads(micro, (0, 3, 2, 1))
    assert grads_of(filled) == [0, 1, 2, 3]
    assert contains(filled.ops, micro.ops) and len(filled.ops) == len(micro.ops) + 2
    for leaf in (0, 2):
        made = next(op for op in filled.ops if filled.micros[0].grads[leaf] in writes(op))
        assert isinstance(made, Compute)
        assert made.target(*made.args, **dict(made.kwargs)).equal(torch.zeros(4, 4))
    done = grads_done(filled)
    assert sorted(done, key=done.__getitem__) == [0, 3, 2, 1], "each zero is made in its turn"
    assert with_zero_grads(filled, (0, 3, 2, 1)) == filled


def test_a_loss_without_a_weight_counts_once() -> None:
    micro, _ = captured("a")
    filled = with_weight(micro)
    (made,) = filled.ops[len(micro.ops) :]
    assert isinstance(made, Compute) and writes(made) == (filled.micros[0].weight,)
    one = made.target(*made.args, **dict(made.kwargs))
    assert one.item() == 1 and one.dtype == torch.float64
    assert with_weight(filled) is filled


def reading(params: Any, batch: Any) -> Tensor:
    names, x = batch
    return chain(names)(params, x)


def united(mesh: zfunc.Mesh, rows: list[Any], budget: int | None) -> Any:
    """Loss and gradients of a union whose leaves all travel alone, and its program."""
    step = zfunc.shard(reading, mesh, prefetch=zfunc.Prefetch(budget))
    step = planned(step, checked(bucket_bytes=0))
    params = {name: torch.eye(4).double() for name in PARAMS}
    state = step.init(params, optim.sgd(0.1))
    value, grads = step.value_and_grad(state.params, rows[mesh.rank])
    return float(value), gathered(grads), step._training.programs.resolved.values()[-1].program


@pytest.mark.parametrize("budget", [None, 2000])
@pytest.mark.parametrize(
    "reads", [["ab", "ac"], ["abcd", "bcde", "cdef"], ["a", "b", "c", "d"]], ids=str
)
def test_gradients_of_a_union_are_those_of_a_dense_run(reads: list[str], budget: Any) -> None:
    rows = [(tuple(names), torch.full((2, 4), 1.0 + k).double()) for k, names in enumerate(reads)]
    params = {name: torch.eye(4).double() for name in PARAMS}
    expected = Oracle(reading, params, axes={"shard": len(reads)}).value_and_grad(
        [[row] for row in rows]
    )
    with checked_unions(bucket_bytes=0):
        results = ranks(len(reads), united, rows, budget)
    for value, grads, program in results:
        assert value == expected.loss
        assert_equal(grads, expected.grads)
        check(program)
        check_same_collectives(program, results[0][2])
