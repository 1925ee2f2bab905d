"""Random programs: any tree, loss, mesh and plan, and ranks that follow losses of their own.

Each is trained densely by plain autograd in one process. Data are small integers: gradients, and
descent along them, must agree bit for bit; Adam within 1e-10, one update after the other. Every
program that runs has been through the checker, after every pass and after ranks were united. 200
examples in CI; `HYPOTHESIS_PROFILE=soak` draws 10,000, others in every run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.checker import check, check_same_collectives
from tests.harness import checked, checked_unions, examples, gathered, planned, ranks, tight
from tests.oracle import Adamw, Oracle, Result, Sgd
from tests.strategies import Recipe, Run, batches, recipes, recipes_up_to, runs, trees
from zfunc import optim
from zfunc.programs import Compiled

SOAK = settings.get_current_profile_name() == "soak"
pytestmark = pytest.mark.timeout(0 if SOAK else 300)

TXS = {"sgd": (optim.sgd(2.0**-12), Sgd(2.0**-12)), "adamw": (optim.adamw(0.25), Adamw(0.25))}


@dataclasses.dataclass(frozen=True)
class Seen:
    """One call of a step on one rank.

    Attributes:
        loss: the mean loss.
        aux: what the loss returned besides, per micro-batch; empty if nothing.
        metrics: those of a step; None for a gradient.
        leaves: the whole leaves after a step, or the whole gradients.
        own: what the rank captured.
        united: what it ran if ranks' programs differed.
        whole: whether what ranks agreed on last gathers everything first.
    """

    loss: float
    aux: list[Any]
    metrics: Any
    leaves: list[Tensor]
    own: Compiled
    united: Compiled | None
    whole: bool


class Growing:
    """A step whose budget grows to what its errors name, as often as they do."""

    def __init__(self, make: Callable[[int | None], zfunc.Step], limit: int | None):
        self._make, self._limit = make, limit
        self.step = make(limit)

    def call(self, name: str, *args: Any) -> Any:
        """Calls a method; after a refusal every rank tries again, from the same state."""
        for _ in range(20):
            try:
                return getattr(self.step, name)(*args)
            except zfunc.BudgetError as error:
                assert self._limit is not None and error.needed_bytes
                self._limit = max(self._limit, error.needed_bytes)
            except zfunc.RemoteRankError as error:
                assert "BudgetError" in str(error) or "live_bytes" in str(error), error
            self.step = self._make(self._limit)
        raise AssertionError(f"no end of larger budgets, the last one of {self._limit}")


def train(
    mesh: zfunc.Mesh, make: Any, limit: int | None, params: Any, run: Run, data: Any, grads: bool
) -> Any:
    """On one rank: a gradient if wanted, then training with each optimizer from the start."""
    step = Growing(functools.partial(make, mesh), limit)
    mine = [rows[mesh.rank] if len(run.rows) > 1 else rows[mesh.rank][0] for rows in data]
    many = len(run.rows) > 1
    seen: dict[str, list[Seen]] = {}
    for name, (tx, _) in TXS.items():
        state = step.step.init(params, tx)
        if grads and not seen:
            value, found = step.call("value_and_grad", state.params, mine[0])
            loss, aux = value if isinstance(value, tuple) else (value, None)
            seen["grad"] = [_seen(step.step, loss, aux, many, None, gathered(found))]
        seen[name] = []
        for batch in mine:
            state, m = step.call("__call__", state, batch)
            after = gathered(state.params)
            seen[name].append(_seen(step.step, m["loss"], m.get("aux"), many, m, after))
    return seen


def _seen(
    step: zfunc.Step, loss: Tensor, aux: Any, many: bool, metrics: Any, leaves: list[Tensor]
) -> Seen:
    programs = step._training.programs
    united = programs.resolved.values()[-1] if programs.resolved.values() else None
    agreed = programs.agreed.values()
    whole = bool(agreed) and agreed[-1].merged is None
    each = [] if aux is None else aux if many else [aux]
    return Seen(float(loss), each, metrics, leaves, programs.compiled[-1], united, whole)


def ran(rows: Sequence[Seen]) -> tuple[list[Compiled], bool]:
    """What each rank ran in one call, and whether it gathered everything first.

    Then gradients are reduced once, after the sum over micro-batches.
    """
    own = [seen.own for seen in rows]
    if len({compiled.digest for compiled in own}) == 1:
        return own, own[0].rung == "dynamic"
    united = [seen.united for seen in rows if seen.united is not None]
    assert len(united) == len(rows)
    return united, rows[0].whole


def compare(
    oracle: Callable[[Any], Oracle], results: list[dict[str, list[Seen]]], data: Any
) -> None:
    """Compares what all ranks saw with the dense run.

    After a step with Adam the dense run goes on from the leaves of the other: where a loss has a
    kink, the last bit of a leaf decides its gradient.
    """
    checked_programs: set[int] = set()
    for name in results[0]:
        dense = oracle(TXS[name][1] if name in TXS else None)
        by_spec = dense.whole_grads
        for number, row in enumerate(zip(*(seen[name] for seen in results), strict=True)):
            compiled, whole = ran(row)
            _check_programs(compiled, checked_programs)
            dense.whole_grads = [whole or one for one in by_spec]
            if name == "grad":
                expected = dense.value_and_grad(data[0])
                leaves = [grad for grad in expected.grads if grad is not None]
            else:
                expected = dense.step(data[number])
                leaves = dense.tensors
            for rank, seen in enumerate(row):
                _compare_one(seen, expected, rank)
                if not (name == "grad" and expected.skipped):
                    assert_close(seen.leaves, leaves, exact=name != "adamw")
            if name == "adamw":
                dense.resume(row[0].leaves)


def _check_programs(compiled: list[Compiled], known: set[int]) -> None:
    for one in compiled:
        if id(one) not in known:
            check(one.program, before=one.micros, united=True)
        known.add(id(one))
        check_same_collectives(one.program, compiled[0].program)


def _compare_one(seen: Seen, expected: Result, rank: int) -> None:
    if not expected.skipped or math.isfinite(expected.loss):
        same = seen.loss == expected.loss
        assert same or (math.isnan(seen.loss) and math.isnan(expected.loss))
    if seen.metrics is not None:
        assert bool(seen.metrics["skipped"]) == expected.skipped
        if not expected.skipped:
            assert float(seen.metrics["grad_norm"]) == pytest.approx(expected.norm, rel=1e-12)
    wanted = [other for other in expected.aux[rank] if other is not None]
    for one, other in zip(seen.aux, wanted, strict=True):
        assert one["name"] == "aux"
        torch.testing.assert_close(one["h"], other["h"], rtol=0, atol=0, equal_nan=True)


def assert_close(got: list[Tensor], expected: list[Tensor], *, exact: bool) -> None:
    """Compares leaves: bit for bit, or within 1e-10 (4 eps for less than double precision)."""
    for a, b in zip(got, expected, strict=True):
        tol = 0.0
        if not exact and b.numel() and (b.is_floating_point() or b.is_complex()):
            tol = 1e-10 if b.dtype.itemsize >= 8 else 4 * torch.finfo(b.dtype).eps
            tol *= max(1.0, float(b.abs().nan_to_num(0).max()))
        torch.testing.assert_close(a, b, rtol=0, atol=tol, equal_nan=True)


sometimes = st.sampled_from([False, False, True])

# What a soak found, shrunk.
MAIN = torch.tensor([[1.0, 0, -3, -1, -2], [-1, 3, 0, 1, 2], [-1, -3, -2, 2, -1]]).double()
EVEN = torch.tensor([[1.0, 2, 2, 1, 1], [0, 0, 0, 3, -3], [3, -3, -2, 1, -1]]).double()
FLAT = zfunc.Flat("shard")
LOOSE = Run({"shard": 2}, FLAT, (3,), (), 0.0, 0, None, remat=None, donate=False)
WHOLE_REST = {"params": {"main": FLAT, "rest": zfunc.P()}, "grads": FLAT, "opt": FLAT}


def recipe(*steps: tuple[str, int, int], weighted: bool = False) -> Recipe:
    return Recipe(steps, weighted=weighted, has_aux=False)


KEPT_WHERE_THE_BUDGET_IS_FULL = {
    "params": {"main": MAIN, "rest": torch.tensor(1.0).double()},
    "recipe": recipe(("largest", 0, 1)),
    "run": LOOSE,
    "grads": False,
}
AWAITED_WITH_THE_NEXT_ONE = {
    "params": {"main": MAIN, "rest": [torch.tensor(1.0)]},
    "chosen": [recipe(("again and again", 0, 1)), recipe(("stacked", 1, 0))],
    "turns": (1, 0, 1),
    "run": dataclasses.replace(LOOSE, specs=WHOLE_REST, rows=(2, 3)),
    "grads": False,
}
SUMMED_IN_ANOTHER_ORDER = {
    "params": {"main": EVEN, "rest": [[[], (EVEN[0, 1], -EVEN[0, 1])], EVEN]},
    "chosen": [
        recipe(("add", 2, 0), ("again and again", 0, 0)),
        recipe(("add", 0, 0), ("again and again", 0, 2)),
    ],
    "turns": (1, 1, 1),
    "run": dataclasses.replace(LOOSE, specs=zfunc.zero(2), rows=(2, 2, 1)),
    "grads": False,
}


@examples(0.7)
@example(**KEPT_WHERE_THE_BUDGET_IS_FULL)
@given(trees(), recipes, runs, sometimes)
def test_ranks_with_one_loss_equal_the_dense_run(
    params: Any, recipe: Recipe, run: Run, grads: bool
) -> None:
    run = without_remat_around_transforms(run, [recipe])
    data = [batches(run, step, branches=recipe.has("by step")) for step in range(2)]

    def make(mesh: zfunc.Mesh, _: int | None) -> zfunc.Step:
        step = zfunc.shard(recipe, mesh, has_aux=recipe.has_aux, **run.options(params))
        plan = tight(run.budget, bucket_bytes=run.bucket_bytes, ahead_bytes=run.ahead_bytes)
        return planned(step, plan)

    results = ranks(run.axes, train, make, None, params, run, data, grads)
    rung = "dynamic" if recipe.has("looks at a value") else "traced"
    assert {seen.own.rung for each in results for calls in each.values() for seen in calls} == {
        rung
    }
    compare(functools.partial(dense_run, recipe, recipe.has_aux, params, run), results, data)


def dense_run(loss: Any, has_aux: bool, params: Any, run: Run, tx: Any) -> Oracle:
    return Oracle(
        loss,
        params,
        tx,
        axes=run.axes,
        whole_grads=run.whole_grads(params),
        trainable=run.trainable(params),
        has_aux=has_aux,
    )


def own_loss(params: Any, batch: Any) -> Any:
    """The recipe comes with the batch, so each rank and micro-batch may follow its own."""
    return Recipe(batch["steps"], batch["weighted"], has_aux=True)(params, batch)


def own_batches(
    run: Run, chosen: Sequence[Recipe], turns: tuple[int, int, int], step: int
) -> list[list[Any]]:
    """Which recipe is whose turns with the rank, the micro-batch and the step."""
    branches = any(recipe.has("by step") for recipe in chosen)
    return [
        [
            batch | {"steps": recipe.steps, "weighted": recipe.weighted}
            for micro, batch in enumerate(row)
            for place in [rank * turns[0] + micro * turns[1] + step * turns[2]]
            for recipe in [chosen[place % len(chosen)]]
        ]
        for rank, row in enumerate(batches(run, step, branches=branches))
    ]


def without_remat_around_transforms(run: Run, chosen: Sequence[Recipe]) -> Run:
    """The dynamic rung refuses torch.func inside of a remat."""
    looks = any(recipe.has("looks at a value") for recipe in chosen)
    transforms = any(recipe.has("functional gradient") for recipe in chosen)
    return dataclasses.replace(run, remat=None) if looks and transforms else run


@examples(0.3)
@example(**AWAITED_WITH_THE_NEXT_ONE)
@example(**SUMMED_IN_ANOTHER_ORDER)
@given(
    trees(),
    st.lists(recipes_up_to(3), min_size=2, max_size=3),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    runs,
    sometimes,
)
def test_ranks_with_losses_of_their_own_equal_the_dense_run(
    params: Any, chosen: list[Recipe], turns: tuple[int, int, int], run: Run, grads: bool
) -> None:
    run = without_remat_around_transforms(run, chosen)
    data = [own_batches(run, chosen, turns, step) for step in range(2)]
    sizes = {"bucket_bytes": run.bucket_bytes}

    def make(mesh: zfunc.Mesh, limit: int | None) -> zfunc.Step:
        budget = zfunc.Prefetch(limit, run.ahead_bytes)
        step = zfunc.shard(own_loss, mesh, has_aux=True, prefetch=budget, **run.options(params))
        return planned(step, checked(**sizes))

    limit = 300 if run.budget == 0 else None
    with checked_unions(**sizes):
        results = ranks(run.axes, train, make, limit, params, run, data, grads)
    compare(functools.partial(dense_run, own_loss, True, params, run), results, data)
