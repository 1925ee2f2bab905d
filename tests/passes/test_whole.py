"""whole: gathers every leaf first and reduces every gradient once, whatever happens in between."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.checker import check, check_same_collectives, live_bytes
from tests.harness import assert_equal, checked, examples, gathered, planned, ranks
from tests.oracle import Oracle, Sgd
from tests.programs import capture
from tests.strategies import Recipe, Run, batch_rows, recipes, runs, trees
from zfunc import optim
from zfunc.passes.whole import call_program, whole_program
from zfunc.program.digest import digest
from zfunc.program.ir import Call, Free, Gather, Program, Reduce, Status, Update
from zfunc.program.memory import memory_analysis

AXES = st.sampled_from([{"shard": 2}, {"shard": 3}, {"replica": 2, "shard": 2}])
SIZES = {"a": (300, 250), "b": (4,), "c": (5, 5), "d": (300, 300)}


def params() -> dict[str, Tensor]:
    """Two leaves that travel alone, two that travel together."""
    return {name: torch.ones(shape) for name, shape in SIZES.items()}


def reads_b(p: Any, x: Tensor) -> Tensor:
    return (p["b"] * x).sum()


def reads_c_and_a(p: Any, x: Tensor) -> Tensor:
    return (p["c"] @ p["c"]).sum() + (p["a"][0, :4] * x).sum()


def reads_nothing(p: Any, x: Tensor) -> Tensor:
    return x.sum()


def weighted(p: Any, x: Tensor) -> Any:
    return (p["d"][0, :4] * x).sum(), 2.0


LOSSES = {loss.__name__: loss for loss in (reads_b, reads_c_and_a, reads_nothing, weighted)}


def micros_of(names: tuple[str, ...], axes: Any, rank: int = 0) -> list[Program]:
    """One micro-batch per name, captured; "call" is the user's function as it is."""
    made = []
    for name in names:
        loss = LOSSES.get(name, reads_b)
        micro, _ = capture(loss, params(), torch.ones(4), axes=axes, rank=rank)
        made.append(call_program(name, micro.leaves, has_loss=True) if name == "call" else micro)
    return made


def whole(names: tuple[str, ...], axes: Any, rank: int = 0, **options: Any) -> Program:
    mesh = dataclasses.replace(zfunc.abstract_mesh(axes), rank=rank)
    settings = {"update": True, "live_bytes": None} | options
    return whole_program(micros_of(names, axes, rank), mesh, **settings)


ANY = st.sampled_from([*LOSSES, "call"])


@examples(0.1)
@given(st.lists(st.tuples(ANY, ANY), min_size=2, max_size=3), AXES, st.booleans())
def test_the_collectives_depend_on_the_leaf_table_alone(
    losses: list[tuple[str, str]], axes: Any, update: bool
) -> None:
    size = zfunc.abstract_mesh(axes).size
    programs = [whole(names, axes, rank % size, update=update) for rank, names in enumerate(losses)]
    weights = [micro.weight for program in programs for micro in program.micros]
    assert None not in weights, "ranks with and without weights must count alike"
    for rank, (program, names) in enumerate(zip(programs, losses, strict=True)):
        check(program, before=micros_of(names, axes, rank % size), united=True)
        check_same_collectives(program, programs[0])
        assert digest(program) == digest(programs[0])
        analysis = memory_analysis(program, axes)
        assert analysis.peak_live_bytes == max(live_bytes(program)) <= program.limit_bytes  # pyright: ignore


@pytest.mark.parametrize("names", [("reads_c_and_a", "reads_b", "call"), ("call",) * 2], ids=str)
def test_gather_all_then_compute_then_reduce_all_once(names: tuple[str, ...]) -> None:
    program = whole(names, {"replica": 2, "shard": 2})
    gathered_leaves = [i for op in program.ops if isinstance(op, Gather) for i in op.leaves]
    # In canonical order of buckets: small leaves of one kind join the first of them.
    assert gathered_leaves == [0, 1, 2, 3]
    reduces = [op for op in program.ops if isinstance(op, Reduce)]
    assert [op.axis for op in reduces] == ["shard", "replica"] * 3
    assert [op.leaves for op in reduces[::2]] == [(0,), (1, 2), (3,)]
    place = {
        kind: [at for at, op in enumerate(program.ops) if isinstance(op, kind)] for kind in KINDS
    }
    copies = {out for op in program.ops if isinstance(op, Gather) for out in op.outs}
    (freed,) = [at for at in place[Free] if copies & set(program.ops[at].values)]  # pyright: ignore
    assert set(program.ops[freed].values) == copies  # pyright: ignore
    assert max(place[Gather]) < min(place[Call]) <= max(place[Call]) < freed < min(place[Reduce])
    assert max(place[Reduce]) < place[Status][0] < place[Update][0]


KINDS = (Gather, Call, Free, Reduce, Status, Update)


@pytest.mark.parametrize("names", [("call",), ("call", "call"), ("reads_b", "reads_c_and_a")])
def test_a_budget_one_byte_too_small_is_refused_by_its_name(names: tuple[str, ...]) -> None:
    for axes in ({"shard": 2}, {"shard": 3}):
        free = whole(names, axes)
        needed = max(live_bytes(free))
        assert whole(names, axes, live_bytes=needed).ops == free.ops
        with pytest.raises(
            zfunc.BudgetError, match=f"(?s)at least {needed}.*got +{needed - 1}"
        ) as e:
            whole(names, axes, live_bytes=needed - 1)
        assert (e.value.needed_bytes, e.value.limit_bytes) == (needed, needed - 1)
        assert e.value.path == "params['d']", "the largest leaf"


def test_full_parameters_and_gradients_at_once() -> None:
    """With one call all copies and all gradients are alive when it returns."""
    nbytes = sum(leaf.nbytes for leaf in params().values())
    program = whole(("call",), {"shard": 2})
    (at,) = [at for at, op in enumerate(program.ops) if isinstance(op, Call)]
    assert live_bytes(program)[at] == max(live_bytes(program)) == 2 * nbytes


def refused(mesh: zfunc.Mesh, needed: int) -> Any:
    """A step that does not fit, then one that does."""

    def step_of(limit: int) -> zfunc.Step:
        budget = zfunc.Prefetch(live_bytes=limit)
        return zfunc.shard(reads_b, mesh, capture="dynamic", prefetch=budget)

    step = step_of(needed - 1)
    state = step.init(params(), optim.sgd(0.5))
    with pytest.raises(zfunc.BudgetError) as error:
        step(state, torch.full((4,), float(mesh.rank)))
    state, _ = step_of(needed)(state, torch.full((4,), float(mesh.rank)))
    return error.value.needed_bytes, gathered(state.params)


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_is_refused_alike_and_the_budget_that_is_named_is_enough(world: int) -> None:
    needed = max(live_bytes(whole(("call",), {"shard": world})))
    oracle = Oracle(reads_b, params(), Sgd(0.5), axes={"shard": world})
    oracle.step([[torch.full((4,), float(rank))] for rank in range(world)])
    for named, after in ranks(world, refused, needed):
        assert named == needed
        assert_equal(after, oracle.tensors)


@examples(0.1)
@given(trees(), recipes, runs)
def test_any_program_whole_is_sound(tree: Any, recipe: Recipe, run: Run) -> None:
    """In place of the pipeline, on every axis and spec; micro-batches are those of `run`."""
    mesh = zfunc.abstract_mesh(run.axes)
    batches = [batch_rows(rows, micro) for micro, rows in enumerate(run.rows)]
    made: list[Program] = []

    def plan(captured: Any, mesh: zfunc.Mesh, *, update: bool, **budgets: Any) -> Program:
        options = {"update": update, "live_bytes": None, "bucket_bytes": run.bucket_bytes}
        program = whole_program(captured, mesh, **options)
        check(program, before=captured, united=True)
        made.append(program)
        return checked()(captured, mesh, update=update, **budgets)

    step = zfunc.shard(recipe, mesh, accum=len(batches), has_aux=recipe.has_aux, specs=run.specs)
    state = step.abstract(tree, optim.sgd(0.5))
    lowered = planned(step, plan).lower(state, batches if len(batches) > 1 else batches[0])
    program = made[0] if made else lowered.program
    check(program)
    assert bool(made) != recipe.has("looks at a value"), "which is on the dynamic rung"
    paths = [
        program.leaves[i].path for op in program.ops if isinstance(op, Gather) for i in op.leaves
    ]
    assert len(paths) == len(set(paths))
    assert set(paths) == {leaf.path for leaf in program.leaves if not leaf.resident}
