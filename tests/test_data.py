"""Plans of batches by tokens: laws for any lengths; losses exact whatever ranks and batches."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.harness import assert_equal, gathered, ranks
from tests.ranks import run_ranks
from zfunc import data, optim, random, schedules
from zfunc.data import Batch, Plan, by_tokens, pad, padded_lengths

LENGTHS = st.lists(st.integers(1, 40), max_size=60)
KEY = random.key(0)


def abstract(world: int) -> Any:
    return zfunc.abstract_mesh({"shard": world})


def meshes(world: int) -> list[Any]:
    return zfunc.local_mesh(world).run(lambda mesh: mesh)


@given(
    LENGTHS,
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["given", "shuffle", "length"]),
    st.integers(1, 6) | st.just([13, 27, 40]),
    st.integers(40, 200),
    st.integers(0, 2),
    st.none() | st.integers(2, 5),
    st.booleans(),
    st.integers(1, 8),
)
def test_laws(
    lengths: list[int],
    world: int,
    accum: int,
    order: Any,
    buckets: Any,
    budget: int,
    min_size: int,
    max_size: int | None,
    drop_last: bool,
    multiple_of: int,
) -> None:
    def plan_of(mesh: Any) -> Plan:
        return by_tokens(
            lengths,
            budget,
            mesh=mesh,
            key=KEY,
            order=order,
            buckets=buckets,
            multiple_of=multiple_of,
            min_size=min_size,
            max_size=max_size,
            accum=accum,
            drop_last=drop_last,
        )

    longest = max(lengths, default=1)
    longest = 40 if isinstance(buckets, list) else math.ceil(longest / multiple_of) * multiple_of
    if lengths and longest * max(min_size, 1) > budget:
        with pytest.raises(ValueError, match=f"give max_tokens of {longest * max(min_size, 1)}"):
            plan_of(meshes(1)[0])
        return
    plans = [plan_of(mesh) for mesh in meshes(world)]
    assert len({plan.rounds for plan in plans}) == 1
    steps = list(zip(*plans, strict=True))  # as many on every rank
    taken: list[int] = []
    for step in steps:
        rows = [one if accum > 1 else [one] for one in step]
        assert all(len(row) == accum for row in rows)
        batches = [batch for row in rows for batch in row]
        assert len({(batch.rows, batch.length) for batch in batches}) == 1
        for batch in batches:
            sizes = [lengths[i] for i in batch.indices]
            assert batch.rows * batch.length <= budget
            assert min_size <= len(sizes) <= batch.rows <= (max_size or budget)
            assert max(sizes, default=0) <= batch.length
            assert batch.tokens == sum(sizes)
            taken += batch.indices
    assert sorted([*taken, *plans[0].dropped]) == list(range(len(lengths)))
    full = [all(len(b.indices) == b.rows for micro in r for b in micro) for r in plans[0].rounds]
    count = len(buckets) if isinstance(buckets, list) else buckets
    assert sum(not whole for whole in full) <= count
    assert len(plans[0].shapes()) <= count
    if drop_last:
        assert all(full)
    elif min_size == 0:
        assert not plans[0].dropped


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3))
def test_padded_lengths_pad_least(lengths: list[int], count: int, multiple_of: int) -> None:
    def padded(chosen: Any) -> int:
        return sum(min(last for last in chosen if last >= size) for size in lengths)

    got = padded_lengths(lengths, count, multiple_of=multiple_of)
    values = sorted({math.ceil(size / multiple_of) * multiple_of for size in lengths})
    assert len(got) <= count and set(got) <= set(values)
    if values:
        every = itertools.combinations(values[:-1], min(count, len(values)) - 1)
        assert padded(got) == min(padded([*others, values[-1]]) for others in every)


@given(LENGTHS.filter(len), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
def test_what_is_left_can_be_planned_for_another_world(
    lengths: list[int], world: int, other: int, done: int
) -> None:
    plan = by_tokens(lengths, 50, mesh=abstract(world), key=KEY)
    rest = plan[done:]
    assert list(rest) == list(plan)[done:] and len(rest) == max(0, len(plan) - done)
    again = by_tokens(lengths, 50, mesh=abstract(other), order="given", only=rest.indices())
    assert sorted(plan[:done].indices() + again.indices()) == list(range(len(lengths)))


def test_the_order_of_samples() -> None:
    lengths = [3, 9, 4, 8, 2, 9, 4, 1]
    mesh = abstract(1)

    def order(**options: Any) -> list[int]:
        return by_tokens(lengths, 9, mesh=mesh, buckets=[9], **options).indices()

    assert order() == list(range(8))
    assert order(order="length") == [7, 4, 0, 2, 6, 3, 1, 5]
    assert order(key=KEY) == random.permutation(KEY, 8).tolist()
    assert order(key=KEY) != order(key=random.key(1))
    assert order(only=[5, 2, 7]) == [5, 2, 7]


def test_what_is_left_joins_longer_samples_if_it_fits_in() -> None:
    mesh, sizes = abstract(2), [1, 1, 1, 5, 5, 2]
    plan = by_tokens(sizes, 10, mesh=mesh, buckets=[2, 5])
    assert plan.rounds == (  # six samples fill neither a round of ten nor, with two, one of four
        ((Batch((0, 1), 5, 2, 2), Batch((2, 5), 5, 2, 3)),),
        ((Batch((3,), 2, 5, 5), Batch((4,), 2, 5, 5)),),
    )
    assert plan.samples() == [4, 2] and plan.tokens() == [5, 10]
    assert plan.padding() == pytest.approx(1 - 15 / 40)
    joined = by_tokens(sizes[1:5], 10, mesh=mesh, buckets=[2, 5])
    assert joined.rounds == (((Batch((0, 1), 2, 5, 2), Batch((2, 3), 2, 5, 10)),),)


def test_a_budget_that_grows() -> None:
    """Short samples come first; long ones wait until the budget holds them."""
    lengths = [8, 1, 1, 2, 8, 2, 1, 8]
    budget = schedules.join([schedules.constant(2), schedules.constant(8)], [2])
    plan = by_tokens(lengths, budget, mesh=abstract(1), buckets=[2, 8])
    got = [(batch.indices, batch.rows, batch.length) for batch in plan]
    assert got == [
        ((1,), 1, 2),
        ((2,), 1, 2),
        ((0,), 1, 8),
        ((4,), 1, 8),
        ((7,), 1, 8),
        ((3, 5, 6), 4, 2),
    ]
    low = by_tokens(lengths, schedules.constant(2), mesh=abstract(1), buckets=[2, 8])
    assert low.dropped == (0, 4, 7) and sorted(low.indices()) == [1, 2, 3, 5, 6]
    with pytest.raises(ValueError, match="does not hold 1 samples of 1"):
        by_tokens(lengths, schedules.constant(0), mesh=abstract(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [3, 0]}, "sample 1 has 0 tokens"),
        ({"order": "shuffle"}, "needs a key"),
        ({"order": "random"}, "'given', 'shuffle', 'length'"),
        ({"buckets": [2]}, "sample 1 has 4 tokens, the longest bucket 2"),
        ({"buckets": []}, "the longest bucket 0"),
        ({"buckets": 0}, "count=0"),
        ({"accum": 0}, "accum=0"),
        ({"multiple_of": 0}, "multiple_of=0"),
        ({"min_size": -1}, "min_size=-1"),
        ({"max_size": 0}, "max_size=0"),
        ({"min_size": 3, "max_size": 2}, "max_size=2 must be 3"),
        ({"min_size": 3}, "give max_tokens of 12"),
    ],
)
def test_wrong_arguments(options: Any, message: str) -> None:
    arguments = {"lengths": [3, 4], "max_tokens": 8, "mesh": abstract(2)} | options
    with pytest.raises(ValueError, match=message):
        by_tokens(**arguments)


def test_pad_keeps_dtype_and_dims() -> None:
    batch = Batch((0, 1), 3, 4, 5)
    samples = [torch.ones(3, 2, dtype=torch.float16), torch.full((2, 2), 2, dtype=torch.float16)]
    rows, real = pad(batch, samples, -1)
    assert rows.dtype == torch.float16 and rows.shape == (3, 4, 2)
    assert torch.equal(rows[:, :, 0], torch.tensor([[1, 1, 1, -1], [2, 2, -1, -1], [-1] * 4]))
    assert torch.equal(real, torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0] * 4]).bool())
    empty, none = pad(Batch((), 2, 4, 0), [], like=samples[0])
    assert empty.shape == (2, 4, 2) and empty.dtype == torch.float16 and not none.any()
    for wrong in (samples[:1], [*samples[:1], torch.ones(5, 2)]):
        with pytest.raises(ValueError):
            pad(batch, wrong)
    with pytest.raises(ValueError, match="like="):
        pad(Batch((), 2, 4, 0), [])


def corpus() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 12, (31,), generator=generator).tolist()
    return [torch.randint(0, 7, (size,), generator=generator) for size in sizes]


def table() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"logits": torch.randn(7, 7, generator=generator, dtype=torch.float64)}


def bigram_loss(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    rows, real = batch
    logits = params["logits"][rows[:, :-1]]
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
    )
    weight = (real[:, 1:] & real[:, :-1]).flatten().double()
    return (each * weight).sum(), weight.sum()


def train(mesh: Any, accum: int) -> tuple[list[list[Tensor]], list[float], int]:
    samples = corpus()
    plan = by_tokens([len(x) for x in samples], 24, mesh=mesh, key=KEY, buckets=3, accum=accum)
    step = zfunc.shard(bigram_loss, mesh, accum=accum)
    state, losses, after = step.init(table(), optim.sgd(0.5)), [], []

    def rows(batch: Batch) -> Any:
        return pad(batch, [samples[i] for i in batch.indices], like=samples[0])

    for batch in plan:
        batches = [rows(one) for one in batch] if accum > 1 else rows(batch)
        state, metrics = step(state, batches)
        losses.append(float(metrics["loss"]))
        after.append(gathered(state.params))
    return after, losses, step.explain().misses


def dense(plan: Plan) -> tuple[list[Tensor], list[float]]:
    """Each step on the bare samples, without padding: their mean over all pairs of tokens."""
    samples, logits = corpus(), table()["logits"].requires_grad_()
    after, losses = [], []
    for n in range(len(plan)):
        chosen = [samples[i] for i in plan[n : n + 1].indices()]
        pairs = torch.cat([torch.stack([x[:-1], x[1:]]) for x in chosen], 1)
        loss = torch.nn.functional.cross_entropy(logits[pairs[0]], pairs[1])
        (grad,) = torch.autograd.grad(loss, logits)
        logits = (logits.detach() - 0.5 * grad).requires_grad_()
        after.append(logits.detach())
        losses.append(float(loss.detach()))
    return after, losses


@pytest.mark.parametrize(("world", "accum"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 3)])
def test_training_averages_over_tokens_exactly(world: int, accum: int) -> None:
    lengths = [len(x) for x in corpus()]
    mesh = abstract(world)
    plan = by_tokens(lengths, 24, mesh=mesh, key=KEY, buckets=3, accum=accum)
    uneven = [{len(b.indices) for micro in row for b in micro} for row in plan.rounds]
    assert any(len(sizes) > 1 for sizes in uneven) or world == 1
    expected, losses = dense(plan)
    for after, told, misses in ranks(world, train, accum):
        assert told == pytest.approx(losses, rel=1e-12)
        for got, whole in zip(after, expected, strict=True):
            assert_equal(got, [whole], 1e-12)
        assert misses <= len(plan.shapes())


def test_training_on_processes_is_the_same() -> None:
    expected = ranks(2, train, 1)
    for got, wanted in zip(run_ranks(2, train, 1), expected, strict=True):
        assert got[1] == wanted[1]
        for one, other in zip(got[0], wanted[0], strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_a_rate_by_the_batch_that_is_used(rule: Any) -> None:
    samples = by_tokens([len(x) for x in corpus()], 24, mesh=abstract(2), key=KEY).samples()
    base = schedules.linear(1.0, 0.0, 10)
    rate = schedules.by_batch(base, samples, 8, rule)
    power = 1.0 if rule == "linear" else 0.5
    for count, size in enumerate(samples):
        assert rate(count) == pytest.approx(base(count) * (size / 8) ** power, rel=1e-15)
    assert schedules.by_batch(0.5, [4, 8, 2], 4)(torch.tensor(1)) == 1.0
    assert schedules.by_batch(0.5, [4, 8, 2], 4)(9) == 0.25  # beyond the end: the last batch

    params = {"w": torch.zeros(1)}
    tx = optim.sgd(schedules.by_batch(0.5, [4, 8, 2], 4))
    state = tx.init(params)
    for size in (4, 8, 2):
        grads = {"w": torch.ones(1)}
        params, state, applied = optim.apply(tx, grads, state, params, optim.LocalInfo())
        assert applied.lr == 0.5 * size / 4
    for wrong in ({"rule": "cube"}, {"base_size": 0}, {"sizes": []}):
        with pytest.raises(ValueError):
            schedules.by_batch(**({"value": 1.0, "sizes": [1], "base_size": 1} | wrong))


def test_lengths_come_as_any_array() -> None:
    mesh = abstract(2)
    plans = [
        data.by_tokens(lengths, 9, mesh=mesh)
        for lengths in ([3, 4, 5], np.array([3, 4, 5], np.int32), torch.tensor([3, 4, 5]))
    ]
    assert plans[0] == plans[1] == plans[2]
