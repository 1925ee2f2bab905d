"""Any tree, any loss, any mesh, any plan: bit for bit what one process computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.adversary import adversary
from tests.harness import assert_equal, bits, examples, gathered, integers, planned, ranks, tight
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


@examples(0.4)
@given(trees(), recipes, runs)
def test_any_step_equals_the_dense_one(params: Any, recipe: Recipe, run: Run) -> None:
    tensors = [x for x in tree.leaves(params) if isinstance(x, Tensor)]
    data = [batches(run, 0), batches(run, 1)]
    oracle = Oracle(
        recipe,
        params,
        Sgd(RATE),
        axes=run.axes,
        whole_grads=whole_grads(run.specs, params),
        trainable=run.trainable(tensors),
        has_aux=recipe.has_aux,
    )
    first = oracle.value_and_grad(data[0])
    expected = [(oracle.step(rows), oracle.tensors) for rows in data]
    results = ranks(run.axes, train, recipe, params, run, optim.sgd(RATE), data)
    for rank, (value, grads, seen) in enumerate(results):
        loss = value[0] if recipe.has_aux else value
        if not first.skipped:
            assert float(loss) == first.loss
            assert_equal(grads, [grad for grad in first.grads if grad is not None])
        for (metrics, after), (result, tensors) in zip(seen, expected, strict=True):
            check(metrics, result, rank, run)
            assert_equal(after, tensors)


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
    return seen


@examples(0.2)
@given(trees(), st.lists(recipes, min_size=4, max_size=4), runs)
def test_ranks_with_losses_of_their_own_equal_the_dense_run(
    params: Any, chosen: list[Recipe], run: Run
) -> None:
    tensors = [x for x in tree.leaves(params) if isinstance(x, Tensor)]
    data = [own_batches(run, chosen, step) for step in range(2)]
    oracle = Oracle(
        own_loss,
        params,
        Sgd(RATE),
        axes=run.axes,
        whole_grads=whole_grads(run.specs, params),
        trainable=run.trainable(tensors),
        has_aux=True,
    )
    expected = [(oracle.step(rows), oracle.tensors) for rows in data]
    for rank, seen in enumerate(ranks(run.axes, train_own, params, run, data)):
        for (metrics, after), (result, leaves) in zip(seen, expected, strict=True):
            check(metrics, result, rank, run)
            assert_equal(after, leaves)


def mlp(params: Any, batch: Any) -> Tensor:
    """Tied, reused, cast and unused leaves in a smooth loss."""
    h = batch["x"] @ params["embed"]
    for layer in params["layers"]:
        h = torch.tanh(h @ layer["w"] + layer["b"].double())
    return ((h @ params["embed"].t() - batch["x"]) ** 2).mean()


def mlp_params() -> Any:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    layers = [{"w": normal(5, 5), "b": normal(5)} for _ in range(3)]
    return {"embed": normal(7, 5), "layers": layers, "unused": normal(3)}


def mlp_batches(world: int, accum: int, steps: int) -> list[list[list[Any]]]:
    """`[step][rank][micro]`; micro-batches differ in shape."""
    generator = torch.Generator().manual_seed(2)
    return [
        [
            [
                {"x": torch.randn((2 + micro, 7), dtype=torch.float64, generator=generator)}
                for micro in range(accum)
            ]
            for _ in range(world)
        ]
        for _ in range(steps)
    ]


MESHES: list[Any] = [
    {"shard": 1},
    {"shard": 2},
    {"shard": 3},
    {"shard": 4},
    {"replica": 2, "shard": 2},
    {"shard": 2, "replica": 2},
]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_five_adamw_steps_equal_the_dense_ones(axes: Any, stage: int) -> None:
    world = math.prod(axes.values())
    accum = stage
    data = mlp_batches(world, accum, 5)
    oracle = Oracle(mlp, mlp_params(), Adamw(0.01), axes=axes, whole_grads=stage == 1)
    first = oracle.value_and_grad(data[0])
    expected = [oracle.step(rows) for rows in data]

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(mlp, mesh, specs=zfunc.zero(stage), accum=accum)
        state = step.init(mlp_params(), optim.adamw(0.01))
        mine = [rows[mesh.rank] if accum > 1 else rows[mesh.rank][0] for rows in data]
        grads = gathered(step.value_and_grad(state.params, mine[0])[1])
        losses = []
        for batch in mine:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return grads, losses, gathered(state.params), int(state.step)

    for grads, losses, params, count in ranks(axes, run):
        assert_equal(grads, first.grads, 1e-12)
        assert losses == pytest.approx([result.loss for result in expected], rel=1e-10)
        assert_equal(params, oracle.tensors, 1e-10)
        assert count == 5


PLANS: dict[str, dict[str, Any]] = {
    "smallest budget, a leaf a bucket": {"fraction": 0.0, "bucket_bytes": 0},
    "a third, a leaf a bucket": {"fraction": 0.3, "bucket_bytes": 0},
    "two thirds, buckets of 300 bytes": {"fraction": 0.7, "bucket_bytes": 300},
    "ample, nothing ahead": {"fraction": 1.0, "bucket_bytes": 0, "ahead_bytes": 0},
    "ample, all ahead": {"fraction": 1.0, "bucket_bytes": 0, "ahead_bytes": 1 << 30},
    "smallest budget, one bucket": {"fraction": 0.0},
}


def two_steps(mesh: zfunc.Mesh, plan: Any, options: Any) -> list[Tensor]:
    """The bits of a rank's state and metrics after two steps in float32."""

    def cast(nodes: Any) -> Any:
        return tree.map(lambda x: x.float(), nodes)

    def loss(params: Any, batch: Any) -> Tensor:
        h = batch["x"] @ params["embed"]
        for layer in params["layers"]:
            h = torch.tanh(h @ layer["w"].bfloat16().float() + layer["b"])
        return ((h @ params["embed"].t() - batch["x"]) ** 2).mean()

    step = zfunc.shard(loss, mesh, accum=2, **options)
    if plan is not None:
        step = planned(step, tight(**plan))
    state = step.init(cast(mlp_params()), optim.adamw(0.01))
    seen = []
    for rows in mlp_batches(mesh.size, 2, 2):
        state, metrics = step(state, cast(rows[mesh.rank]))
        seen += [metrics["loss"], metrics["grad_norm"]]
    return bits(state.params) + bits(state.opt_state) + seen


@pytest.fixture(scope="module")
def reference() -> list[list[Tensor]]:
    return ranks(2, two_steps, None, {})


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_plan_changes_a_bit(plan: Any, reference: Any) -> None:
    for got, expected in zip(ranks(2, two_steps, plan, {}), reference, strict=True):
        assert_equal(got, expected)


@pytest.mark.parametrize(
    "options",
    [{"donate": False}, {"remat": zfunc.policies.nothing}, {"nonfinite": "ignore"}],
    ids=["not donated", "remat", "ignore"],
)
def test_no_option_changes_a_bit(options: Any, reference: Any) -> None:
    for got, expected in zip(ranks(2, two_steps, None, options), reference, strict=True):
        assert_equal(got, expected)


def test_late_communication_in_random_order_changes_no_bit(reference: Any) -> None:
    def run(mesh: zfunc.Mesh, seed: int) -> Any:
        return two_steps(adversary(mesh, seed), {"fraction": 0.5, "bucket_bytes": 0}, {})

    for seed in range(2):
        for got, expected in zip(ranks(2, run, seed), reference, strict=True):
            assert_equal(got, expected)


def test_sharing_of_gradients_changes_no_bit_with_one_micro_batch() -> None:
    """With one micro-batch ZeRO 1, 2 and 3 add the same numbers in the same order."""

    def run(mesh: zfunc.Mesh, stage: int) -> Any:
        step = zfunc.shard(mlp, mesh, specs=zfunc.zero(stage))
        state = step.init(mlp_params(), optim.adamw(0.01))
        for rows in mlp_batches(mesh.size, 1, 3):
            state, _ = step(state, rows[mesh.rank][0])
        return gathered(state.params)

    one, two, three = (ranks(3, run, stage)[0] for stage in (1, 2, 3))
    assert_equal(one, two)
    assert_equal(two, three)


def test_a_bare_tensor_is_a_tree() -> None:
    start = integers(torch.Generator().manual_seed(0), (5,))

    def loss(x: Tensor, batch: Tensor) -> Tensor:
        return (x * batch).sum() ** 2

    data = [[torch.arange(5.0).double() - rank] for rank in range(2)]
    oracle = Oracle(loss, start, Sgd(RATE), axes={"shard": 2})
    oracle.step(data)

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh)
        state, _ = step(step.init(start, optim.sgd(RATE)), data[mesh.rank][0])
        return zfunc.gather(state.params)

    for got in ranks(2, run):
        assert torch.equal(got, oracle.params)
