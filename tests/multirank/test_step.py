"""Steps on real processes over gloo: bit for bit those of virtual ranks, also when a rank fails."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

import zfunc
from tests.adversary import adversary
from tests.harness import assert_equal, bits, examples, gathered, planned, ranks, tight
from tests.oracle import Adamw, Oracle, Sgd
from tests.ranks import run_ranks
from tests.strategies import Recipe, Run, batches, recipes, runs, trees
from tests.test_equality import mlp, mlp_batches, mlp_params, two_steps
from zfunc import optim, random, tree
from zfunc.comm.start import connect

HSDP = {"replica": 2, "shard": 2}


def over_gloo(axes: Any, fn: Any, *args: Any) -> list[Any]:
    return run_ranks(math.prod(axes.values()), fn, *args, axes=axes)


@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 3}, HSDP], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_processes_give_the_bits_of_virtual_ranks(axes: Any, stage: int) -> None:
    plan = {"fraction": 0.3, "bucket_bytes": 0} if stage == 3 else None
    options = {"specs": zfunc.zero(stage)}
    real = over_gloo(axes, two_steps, plan, options)
    for got, expected in zip(real, ranks(axes, two_steps, plan, options), strict=True):
        assert_equal(got, expected)


def train(mesh: zfunc.Mesh, recipe: Recipe, params: Any, run: Run) -> Any:
    """A gradient, then one step under the plan of the run."""
    step = zfunc.shard(recipe, mesh, has_aux=recipe.has_aux, **run.options(params))
    plan = tight(run.budget, bucket_bytes=run.bucket_bytes, ahead_bytes=run.ahead_bytes)
    step = planned(step, plan)
    state = step.init(params, optim.sgd(2.0**-12))
    row = batches(run, 0)[mesh.rank]
    batch = row if len(row) > 1 else row[0]
    _, grads = step.value_and_grad(state.params, batch)
    whole = gathered(grads)
    state, metrics = step(state, batch)
    return whole, metrics, gathered(state.params)


@examples(0.2)
@given(trees(), recipes, runs)
def test_any_step_gives_the_bits_of_virtual_ranks(params: Any, recipe: Recipe, run: Run) -> None:
    real = over_gloo(run.axes, train, recipe, params, run)
    virtual = ranks(run.axes, train, recipe, params, run)
    for (grads, metrics, after), (others, wanted, leaves) in zip(real, virtual, strict=True):
        assert_equal(grads, others)
        assert_equal(after, leaves)
        assert int(metrics["skipped"]) == int(wanted["skipped"])
        assert metrics["loss"].tolist() == pytest.approx(wanted["loss"].tolist(), nan_ok=True)


def adversarial_steps(mesh: zfunc.Mesh, seed: int) -> Any:
    return two_steps(adversary(mesh, seed), {"fraction": 0.5, "bucket_bytes": 0}, {})


def test_late_communication_in_random_order_changes_no_bit() -> None:
    expected = ranks(2, two_steps, None, {})
    for seed in range(2):
        for got, bits_of in zip(run_ranks(2, adversarial_steps, seed), expected, strict=True):
            assert_equal(got, bits_of)


# Failures.


def table() -> dict[str, Tensor]:
    return {"emb": torch.arange(12.0).view(4, 3), "w": torch.ones(3, 3)}


def lookup_loss(params: Any, index: Tensor) -> Tensor:
    if len(index) == 3:
        raise ZeroDivisionError("nothing to divide")
    return ((F.embedding(index, params["emb"]) @ params["w"]) ** 2).mean()


def fails_and_goes_on(mesh: zfunc.Mesh, bad: Tensor, bad_rank: int) -> Any:
    """What each rank said, and the leaves after a good step from the same state."""
    step = zfunc.shard(lookup_loss, mesh)
    state = step.init(table(), optim.sgd(2.0**-8))
    kept = bits(state)
    good = torch.tensor([mesh.rank, 1])
    try:
        step(state, bad if mesh.rank == bad_rank else good)
        said = "returned"
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert_equal(bits(state), kept)
    state, _ = step(state, good)
    return said, gathered(state.params)


@pytest.mark.parametrize(
    ("bad", "own"),
    [
        (torch.tensor([99, 1]), "IndexError: index out of range in self"),
        (torch.tensor([1, 1, 1]), "ZeroDivisionError: nothing to divide"),
    ],
    ids=["while it runs", "while it is captured"],
)
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_a_failing_rank_is_an_error_on_all_and_the_next_step_works(
    bad: Tensor, own: str, bad_rank: int
) -> None:
    oracle = Oracle(lookup_loss, table(), Sgd(2.0**-8), axes={"shard": 3})
    oracle.step([[torch.tensor([rank, 1])] for rank in range(3)])
    told = f"RemoteRankError: step 0 failed on rank {bad_rank}: {own}"
    for rank, (said, after) in enumerate(run_ranks(3, fails_and_goes_on, bad, bad_rank)):
        assert said == (own if rank == bad_rank else told)
        assert_equal(after, oracle.tensors)


def differing_settings(mesh: zfunc.Mesh) -> str:
    step = zfunc.shard(lookup_loss, mesh, nonfinite="raise" if mesh.rank else "skip")
    state = step.init(table(), optim.sgd(0.5))
    kept = bits(state)
    with pytest.raises(zfunc.ProgramMismatchError) as caught:
        step(state, torch.tensor([0, 1]))
    assert_equal(bits(state), kept)
    return str(caught.value)


def test_differing_settings_are_the_same_error_on_all() -> None:
    one, other = run_ranks(2, differing_settings)
    assert one == other
    assert "'skip'" in one and "'raise'" in one


def poisoned(mesh: zfunc.Mesh) -> Any:
    """A step that is NaN on one rank only, then a good one."""
    step = zfunc.shard(mlp, mesh)
    state = step.init(mlp_params(), optim.adamw(0.01))
    kept = bits(state.params) + bits(state.opt_state)
    batch = mlp_batches(2, 1, 1)[0][mesh.rank][0]
    bad = tree.map(lambda x: x * math.nan, batch) if mesh.rank == 1 else batch
    state, metrics = step(state, bad)
    assert int(metrics["skipped"]) == 1
    assert_equal(bits(state.params) + bits(state.opt_state), kept)
    state, metrics = step(state, batch)
    return int(metrics["skipped"]), gathered(state.params)


def test_nan_on_one_rank_is_a_skip_on_all() -> None:
    oracle = Oracle(mlp, mlp_params(), Adamw(0.01), axes={"shard": 2})
    oracle.step(mlp_batches(2, 1, 1)[0])
    for skipped, after in run_ranks(2, poisoned):
        assert skipped == 0
        assert_equal(after, oracle.tensors, 1e-12)


# Init and adopt.


def drawn(key: Tensor) -> dict[str, Tensor]:
    one, other = random.split(key)
    return {"a": random.normal(one, (7, 3)), "b": random.uniform(other, (5,))}


def initial(mesh: zfunc.Mesh) -> list[Tensor]:
    step = zfunc.shard(mlp, mesh)
    return gathered(step.init(drawn, optim.sgd(0.5), key=random.key(1)).params)


def test_an_init_by_key_does_not_depend_on_the_mesh() -> None:
    expected = tree.leaves(drawn(random.split(random.key(1))[0]))
    for world in (2, 3):
        for got in run_ranks(world, initial):
            assert_equal(got, expected)


def differing_init(mesh: zfunc.Mesh) -> str:
    params = {"w": torch.zeros(3), "h": [torch.full((2,), float(mesh.rank == 1))]}
    with pytest.raises(zfunc.LayoutError) as caught:
        zfunc.shard(mlp, mesh).init(params, optim.sgd(0.5))
    return str(caught.value).splitlines()[0]


def test_a_leaf_that_differs_is_named_on_every_rank() -> None:
    assert run_ranks(3, differing_init) == ["params['h'][0] differs between ranks"] * 3


def moves(mesh: zfunc.Mesh, path: str) -> Any:
    """Two steps on one mesh, then two on another of the same processes, and two back again."""
    store = dist.FileStore(path, 4)
    flat = connect(
        {"shard": 4}, tuple(range(4)), mesh.rank, device=mesh.device, timeout_s=30, store=store
    )
    data = mlp_batches(4, 1, 6)
    one = zfunc.shard(mlp, mesh, specs=zfunc.zero(2))
    other = zfunc.shard(mlp, flat)
    state = one.init(mlp_params(), optim.adamw(0.01))
    for number, rows in enumerate(data):
        step = other if number in (2, 3) else one
        if number in (2, 4):
            state = step.adopt(state)
        state, _ = step(state, rows[mesh.rank][0])
    return gathered(state.params)


def test_a_state_moves_between_meshes_of_the_same_processes(tmp_path: Path) -> None:
    oracle = Oracle(mlp, mlp_params(), Adamw(0.01), axes=HSDP)
    for rows in mlp_batches(4, 1, 6):
        oracle.step(rows)
    for after in run_ranks(4, moves, str(tmp_path / "store"), axes=HSDP):
        assert_equal(after, oracle.tensors, 1e-10)
