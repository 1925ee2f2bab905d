"""Any mesh, any plan, any option: what one process computes; bit for bit where that is asked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.adversary import adversary
from tests.harness import assert_equal, bits, gathered, integers, planned, ranks, tight
from tests.oracle import Adamw, Oracle, Sgd
from zfunc import optim, tree

RATE = 2.0**-12


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
    [
        {"donate": False},
        {"remat": zfunc.policies.nothing},
        {"remat": zfunc.policies.matmuls},
        {"remat": zfunc.policies.budget(200)},
        {"nonfinite": "ignore"},
    ],
    ids=["not donated", "remat", "matmuls", "budget", "ignore"],
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
