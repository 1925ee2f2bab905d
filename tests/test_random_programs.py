"""Random programs: any tree, loss, mesh and plan, and ranks that follow losses of their own.

Each is trained densely by plain autograd in one process; data are small integers, so gradients and
descent must agree bit for bit. Every program that runs has been through the checker. 200 examples
in CI; `HYPOTHESIS_PROFILE=soak` draws 10,000, others in every run.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.checker import check as check_program
from tests.checker import check_same_collectives
from tests.harness import assert_equal, examples, gathered, planned, ranks, tight
from tests.oracle import Adamw, Oracle, Result, Sgd
from tests.strategies import Recipe, Run, batch_rows, recipes, runs, trees
from zfunc import optim, tree

RATE = 2.0**-12


def whole_grads(specs: Any, params: Any) -> list[bool]:
    """Which tensor leaves have gradients that are whole on every rank, written out by hand."""
    tensors = [x for x in tree.leaves(params) if isinstance(x, Tensor)]
    if specs == zfunc.zero(1) or specs == zfunc.P():
        return [True] * len(tensors)
    if isinstance(specs, dict) and "main" in specs:
        return [x is params["main"] for x in tensors]
    min_numel = specs.min_numel if isinstance(specs, zfunc.Flat) else 0
    return [x.numel() < min_numel for x in tensors]


def trainable_tree(run: Run, params: Any) -> Any:
    leaves, structure = tree.flatten(params)
    flags = iter(run.trainable([x for x in leaves if isinstance(x, Tensor)]))
    return tree.unflatten(
        structure, [next(flags) if isinstance(x, Tensor) else True for x in leaves]
    )


def batches(run: Run, step: int) -> list[list[Any]]:
    """`[rank][micro]`; the number of rows differs between micro-batches and between ranks."""
    return [
        [
            batch_rows((rows + rank) % 4, 1000 * step + 10 * rank + micro)
            for micro, rows in enumerate(run.rows)
        ]
        for rank in range(run.world)
    ]


def make_step(mesh: zfunc.Mesh, recipe: Any, params: Any, run: Run) -> zfunc.Step:
    step = zfunc.shard(
        recipe,
        mesh,
        specs=run.specs,
        trainable=trainable_tree(run, params),
        remat=zfunc.policies.nothing if run.remat else None,
        accum=len(run.rows),
        has_aux=recipe.has_aux,
        donate=run.donate,
    )
    plan = tight(run.budget, bucket_bytes=run.bucket_bytes, ahead_bytes=run.ahead_bytes)
    return planned(step, plan)


def looks(recipe: Recipe) -> bool:
    """Whether a loss is run by Python, since it looks at a value."""
    return any(name == "looks at a value" for name, _, _ in recipe.steps)


def check_programs(step: zfunc.Step) -> Any:
    """Checks every program that a rank has run; returns the last."""
    programs = step._training.programs
    ran = [*programs.compiled, *programs.resolved.values()]
    for compiled in ran:
        check_program(compiled.program)
    return ran[-1].program


def train(mesh: zfunc.Mesh, recipe: Any, params: Any, run: Run, tx: Any, data: Any) -> Any:
    """On one rank: gradients at the start, then some steps; whole leaves and metrics."""
    step = make_step(mesh, recipe, params, run)
    state = step.init(params, tx)
    mine = [rows[mesh.rank] if len(run.rows) > 1 else rows[mesh.rank][0] for rows in data]
    value, grads = step.value_and_grad(state.params, mine[0])
    seen = []
    for batch in mine:
        state, metrics = step(state, batch)
        seen.append((metrics, gathered(state.params)))
    check_programs(step)
    return value, gathered(grads), seen


def check(got: Any, expected: Result, rank: int, run: Run) -> None:
    """Compares the metrics of one step."""
    loss = float(got["loss"])
    assert loss == expected.loss or (math.isnan(loss) and math.isnan(expected.loss))
    assert bool(got["skipped"]) == expected.skipped
    if not expected.skipped:
        assert float(got["grad_norm"]) == pytest.approx(expected.norm, rel=1e-12)
    if "aux" in got:
        each = got["aux"] if len(run.rows) > 1 else [got["aux"]]
        for one, other in zip(each, expected.aux[rank], strict=True):
            assert one["name"] == "aux"
            assert torch.equal(one["h"], other["h"])


@examples(0.6)
@given(trees(), recipes, runs, st.booleans())
def test_any_step_equals_the_dense_one(
    params: Any, recipe: Recipe, run: Run, adaptive: bool
) -> None:
    tensors = [x for x in tree.leaves(params) if isinstance(x, Tensor)]
    trained = [x for x, on in zip(tensors, run.trainable(tensors), strict=True) if on]
    # The equations of Adam are those of real numbers, and one update of exact gradients is enough.
    adaptive = adaptive and all(x.dtype == torch.float64 for x in trained)
    data = [batches(run, 0)] if adaptive else [batches(run, 0), batches(run, 1)]
    tx, dense_tx = optim.sgd(RATE), Sgd(RATE)
    if adaptive:
        tx, dense_tx = optim.adamw(0.01), Adamw(0.01)
    oracle = Oracle(
        recipe,
        params,
        dense_tx,
        axes=run.axes,
        # Called as it is, a loss has its micro-batches summed before they are reduced.
        whole_grads=looks(recipe) or whole_grads(run.specs, params),
        trainable=run.trainable(tensors),
        has_aux=recipe.has_aux,
    )
    first = oracle.value_and_grad(data[0])
    expected = [(oracle.step(rows), oracle.tensors) for rows in data]
    results = ranks(run.axes, train, recipe, params, run, tx, data)
    for rank, (value, grads, seen) in enumerate(results):
        loss = value[0] if recipe.has_aux else value
        if not first.skipped:
            assert float(loss) == first.loss
            assert_equal(grads, [grad for grad in first.grads if grad is not None])
        for (metrics, after), (result, tensors) in zip(seen, expected, strict=True):
            check(metrics, result, rank, run)
            assert_equal(after, tensors, 1e-10 if adaptive else 0.0)


def own_loss(params: Any, batch: Any) -> Any:
    """The recipe comes with the batch, so each rank and micro-batch may follow its own."""
    return Recipe(batch["steps"], has_aux=True)(params, batch)


def own_batches(run: Run, chosen: list[Recipe], step: int) -> list[list[Any]]:
    return [
        [
            batch | {"steps": chosen[(rank + micro * (step + 1)) % len(chosen)].steps}
            for micro, batch in enumerate(row)
        ]
        for rank, row in enumerate(batches(run, step))
    ]


def train_own(mesh: zfunc.Mesh, params: Any, run: Run, data: Any) -> Any:
    """Two steps without a plan of the test's: ranks unite programs that differ."""
    step = zfunc.shard(
        own_loss,
        mesh,
        specs=run.specs,
        trainable=trainable_tree(run, params),
        remat=zfunc.policies.nothing if run.remat else None,
        accum=len(run.rows),
        has_aux=True,
    )
    state = step.init(params, optim.sgd(RATE))
    seen = []
    for rows in data:
        batch = rows[mesh.rank] if len(run.rows) > 1 else rows[mesh.rank][0]
        state, metrics = step(state, batch)
        seen.append((metrics, gathered(state.params)))
    return seen, check_programs(step)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@examples(0.4)
@given(trees(), st.lists(recipes, min_size=4, max_size=4), runs)
def test_ranks_with_losses_of_their_own_equal_the_dense_run(
    params: Any, chosen: list[Recipe], run: Run
) -> None:
    tensors = [x for x in tree.leaves(params) if isinstance(x, Tensor)]
    data = [own_batches(run, chosen, step) for step in range(2)]
    expected = []
    # Ranks that gather everything sum micro-batches first. The first step is exact in any order.
    for whole in (whole_grads(run.specs, params), True):
        oracle = Oracle(
            own_loss,
            params,
            Sgd(RATE),
            axes=run.axes,
            whole_grads=whole,
            trainable=run.trainable(tensors),
            has_aux=True,
        )
        expected.append([(oracle.step(rows), oracle.tensors) for rows in data])
    results = ranks(run.axes, train_own, params, run, data)
    for rank, (seen, program) in enumerate(results):
        check_same_collectives(program, results[0][1])
        for (metrics, after), (one, leaves), (_, others) in zip(seen, *expected, strict=True):
            check(metrics, one, rank, run)
            assert_equal(after, others if same(after, others) else leaves)
