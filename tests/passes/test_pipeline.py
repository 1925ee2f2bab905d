"""The whole pipeline: sound after every pass, alike on every rank, within any feasible budget."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.checker import check, check_same_collectives, live_bytes
from tests.harness import checked, examples, planned, tight
from tests.strategies import Recipe, Run, batch_rows, recipes, runs, trees
from zfunc import optim
from zfunc.program.digest import digest
from zfunc.program.ir import Gather, Program, Reduce
from zfunc.program.memory import memory_analysis


def lowered(
    loss: Any, mesh: zfunc.Mesh, params: Any, batches: list[Any], plan: Any, **options: Any
) -> Program:
    """The program of a rank of an abstract mesh."""
    step = zfunc.shard(loss, mesh, accum=len(batches), **options)
    step = planned(step, plan)
    state = step.abstract(params, optim.sgd(0.5))
    return step.lower(state, batches if len(batches) > 1 else batches[0]).program


def rank_of(axes: Any, rank: int) -> zfunc.Mesh:
    return dataclasses.replace(zfunc.abstract_mesh(axes), rank=rank)


@examples(0.6)
@given(trees(), recipes, runs, st.sampled_from([2, 3, 5]))
def test_all_ranks_plan_alike_within_the_budget(
    params: Any, recipe: Recipe, run: Run, world: int
) -> None:
    """Pieces differ in size between ranks; plans must not. The checker sees every pass."""
    axes = run.axes if len(run.axes) > 1 else {"shard": world}
    options = {"specs": run.specs, "has_aux": recipe.has_aux}
    batches = [batch_rows(rows, micro) for micro, rows in enumerate(run.rows)]
    plan = tight(run.budget, bucket_bytes=run.bucket_bytes, ahead_bytes=run.ahead_bytes)
    size = zfunc.abstract_mesh(axes).size
    programs = [
        lowered(recipe, rank_of(axes, rank), params, batches, plan, **options)
        for rank in (0, size - 1)
    ]
    one, other = programs
    check_same_collectives(one, other)
    assert digest(one) == digest(other)
    assert one.limit_bytes == other.limit_bytes
    for program in programs:
        peak = memory_analysis(program, axes).peak_live_bytes
        assert peak == max(live_bytes(program), default=0) <= program.limit_bytes


def mlp(params: Any, batch: Tensor) -> Tensor:
    for w in params["layers"]:
        batch = torch.relu(batch @ w.double())
    return ((batch @ params["layers"][0].double().t()) ** 2).mean() + params["scale"].sum()


def mlp_params(sizes: list[int]) -> dict[str, Any]:
    layers = [torch.ones(a, b) for a, b in itertools.pairwise(sizes)]
    return {"layers": layers, "scale": torch.ones(3)}


@examples(0.3)
@given(st.lists(st.integers(2, 6), min_size=3, max_size=5), st.integers(1, 2), st.data())
def test_the_smallest_budget_is_feasible_and_one_byte_less_is_not(
    sizes: list[int], accum: int, data: Any
) -> None:
    mesh = rank_of({"shard": data.draw(st.integers(2, 4))}, 1)
    bucket_bytes = data.draw(st.sampled_from([0, 64, 1 << 20]))
    batches = [torch.ones(2 + micro, sizes[0]).double() for micro in range(accum)]
    params = mlp_params([*sizes, sizes[1]])

    def plan(limit: int | None) -> Program:
        budget = checked(live_bytes=limit, bucket_bytes=bucket_bytes)
        return lowered(mlp, mesh, params, batches, budget)

    with pytest.raises(zfunc.BudgetError) as refused:
        plan(0)
    least = refused.value.needed_bytes
    assert max(live_bytes(plan(least))) <= least
    with pytest.raises(zfunc.BudgetError) as again:
        plan(least - 1)
    assert again.value.needed_bytes == least


def test_nothing_is_kept_up_to_an_op_that_needs_the_whole_budget() -> None:
    """The largest element, found again in backward, next to a gather that leaves no room for it."""

    def loss(p: Any, x: Tensor) -> Tensor:
        first = [F.pad(leaf.view(-1)[:4], (0, max(0, 4 - leaf.numel()))) for leaf in p.values()]
        return (x.sum(0) * first[0].amax() - first[1].amin()).clamp(-8, 8).square().sum()

    params = {"a": torch.ones(3, 5).double(), "b": torch.ones(()).double()}
    specs = zfunc.Flat("shard", min_numel=0)
    batches = [torch.ones(2, 4).double()]
    plan = tight(0.0, bucket_bytes=0)
    program = lowered(loss, rank_of({"shard": 2}, 1), params, batches, plan, specs=specs)
    most = params["a"].nbytes + 8 * params["a"].element_size()
    assert max(live_bytes(program)) == program.limit_bytes == most


def gathered_bytes(program: Program) -> int:
    return sum(
        program.leaves[i].spec.nbytes
        for op in program.ops
        if isinstance(op, Gather)
        for i in op.leaves
    )


def test_a_larger_budget_gathers_less_down_to_once() -> None:
    mesh = rank_of({"shard": 2}, 0)
    params = mlp_params([8] * 9)
    batch = [torch.ones(2, 8).double()]
    whole = sum(w.nbytes for w in params["layers"]) + params["scale"].nbytes
    amounts = []
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        amounts.append(
            gathered_bytes(lowered(mlp, mesh, params, batch, tight(fraction, bucket_bytes=0)))
        )
    assert amounts == sorted(amounts, reverse=True)
    assert amounts[-1] == whole < amounts[0]


def test_rates_move_issue_slots_and_nothing_else() -> None:
    params, batch = mlp_params([8] * 6), [torch.ones(2, 8).double()]
    programs = []
    instant = zfunc.Hardware(
        flops_per_s=1.0, memory_bytes_per_s=1.0, network_bytes_per_s=1e18, message_s=0.0
    )
    for hw in (zfunc.Hardware(), zfunc.Hardware(message_s=1.0), instant):
        mesh = zfunc.abstract_mesh({"shard": 2}, hw=hw)
        plan = checked(bucket_bytes=0, live_bytes=4000)
        programs.append(lowered(mlp, mesh, params, batch, plan))
    first, *others = programs
    for other in others:
        check_same_collectives(first, other)
        assert sorted(map(repr, first.ops)) == sorted(map(repr, other.ops))
    assert first.ops != programs[2].ops, "what takes no time is issued at its use"


def test_the_same_inputs_give_the_same_program() -> None:
    params, batch = mlp_params([8] * 6), [torch.ones(2, 8).double()]
    plan = tight(0.4, bucket_bytes=0)
    one, other = (lowered(mlp, rank_of({"shard": 3}, 1), params, batch, plan) for _ in range(2))
    assert one.ops == other.ops and one.values == other.values


def test_tiny_leaves_travel_together() -> None:
    """The number of collectives does not depend on the number of leaves."""

    def loss(params: Any, batch: Tensor) -> Tensor:
        return sum((x.sum() * batch.sum() for x in params), torch.zeros(()))

    counts = set()
    for number in (10, 100):
        program = lowered(
            loss,
            rank_of({"shard": 2}, 0),
            [torch.ones(1 + i % 5) for i in range(number)],
            [torch.ones(2)],
            checked(),
        )
        check(program)
        counts.add(sum(isinstance(op, Gather | Reduce) for op in program.ops))
    assert counts == {2}


def test_an_empty_leaf_that_comes_first_is_gathered_and_reduced() -> None:
    def loss(params: Any, batch: Tensor) -> Tensor:
        return params["a"].sum() + (params["b"] * batch).sum()

    params = {"a": torch.ones(0, 3), "b": torch.ones(4)}
    program = lowered(loss, rank_of({"shard": 2}, 0), params, [torch.ones(4)], checked())
    moved = [op for op in program.ops if isinstance(op, Gather | Reduce)]
    assert {program.leaves[i].path for op in moved for i in op.leaves} == {
        "params['a']",
        "params['b']",
    }


@pytest.mark.parametrize(
    "axes", [{"shard": 3}, {"replica": 2, "shard": 2}, {"shard": 2, "replica": 2}], ids=str
)
def test_no_budget_is_exceeded_while_reduces_wait(axes: Any) -> None:
    """Several reduces in a row, each awaited as late as the next one: once over the budget."""
    mesh, params = rank_of(axes, 0), mlp_params([5] * 5)
    batches = [torch.ones(3, 5).double()] * 2
    for fraction in (0.1, 0.3, 0.5, 0.7, 0.9):
        check(lowered(mlp, mesh, params, batches, tight(fraction, bucket_bytes=0)))
