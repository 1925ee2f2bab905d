"""Precision: what plain torch computes with the same casts, bit for bit, under any sharding."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import assert_equal, gathered, planned, ranks, tight
from tests.oracle import Adamw, Oracle, Sgd
from tests.ranks import run_ranks
from zfunc import Precision, optim, tree
from zfunc.program.ir import Gather, Reduce

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
RATE = 2.0**-6
MIXED = Precision(compute=BF16, reduce=FP32, output=FP32, batch=BF16)
AXES: list[Any] = [{"shard": 1}, {"shard": 2}, {"shard": 3}, {"replica": 2, "shard": 2}]


def params() -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (6, 5), "hidden": (5, 5), "gain": (5,), "unused": (3,)}
    made: Any = {n: torch.randn(s, generator=generator) / 2 for n, s in shapes.items()}
    return made | {"table": torch.arange(4), "name": "relu"}


def loss_fn(p: Any, b: Any) -> Tensor:
    """Tied and reused leaves, an integer leaf and a static one."""
    h = torch.tanh(b["x"] @ p["embed"])
    h = torch.relu(h @ p["hidden"]) * p["gain"] + h[:, p["table"][1:2]]
    return (h @ p["embed"].t() - b["x"]).square().mean()


def looking(p: Any, b: Any) -> Tensor:
    """The same on the dynamic rung."""
    value = loss_fn(p, b)
    return value if float(value.detach()) > -1.0 else -value


def batch(rank: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return {"x": torch.randn(2 + rank, 6, generator=generator)}


def cast(value: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree.map(one, value)


def by_hand(p: Any, b: Any) -> Tensor:
    """What `MIXED` means."""
    return loss_fn(cast(p, BF16), cast(b, BF16)).float()


def dense(axes: Any, accum: int, steps: int, loss: Any = by_hand, **options: Any) -> Oracle:
    oracle = Oracle(loss, params(), Sgd(RATE), axes=axes, **options)
    for number in range(steps):
        oracle.step(rows(axes, accum, number))
    return oracle


def rows(axes: Any, accum: int, number: int) -> list[list[Any]]:
    return [
        [batch(rank + 7 * micro, number) for micro in range(accum)]
        for rank in range(math.prod(axes.values()))
    ]


def train(mesh: zfunc.Mesh, accum: int, loss: Any, plan: Any, options: Any) -> Any:
    """Whole leaves and losses of two steps, and the gradient at the start."""
    step = zfunc.shard(loss, mesh, accum=accum, **options)
    step = step if plan is None else planned(step, plan)
    state = step.init(params(), optim.sgd(RATE))
    data = [rows(mesh.axes, accum, number)[mesh.rank] for number in range(2)]
    mine = [row if accum > 1 else row[0] for row in data]
    grads = gathered(step.value_and_grad(state.params, mine[0])[1])
    losses = []
    for one in mine:
        state, metrics = step(state, one)
        losses.append(metrics["loss"])
    return grads, losses, gathered(state.params), state


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accum", [1, 2])
def test_any_sharding_equals_casts_by_hand(axes: Any, stage: int, accum: int) -> None:
    whole = stage == 1
    oracle = dense(axes, accum, 2, whole_grads=whole)
    start = Oracle(by_hand, params(), axes=axes, whole_grads=whole)
    first = start.value_and_grad(rows(axes, accum, 0))
    options = {"specs": zfunc.zero(stage), "precision": MIXED}
    for plan in (tight(0.0, bucket_bytes=0), tight(1.0)):
        for grads, losses, leaves, _ in ranks(axes, train, accum, loss_fn, plan, options):
            assert_equal(grads, [grad for grad in first.grads if grad is not None])
            assert all(grad.dtype == FP32 for grad in grads)
            assert [value.dtype for value in losses] == [FP32, FP32]
            assert float(losses[0]) == pytest.approx(first.loss, rel=1e-6)
            assert_equal(leaves, oracle.tensors)


@pytest.mark.parametrize("options", [{}, {"remat": zfunc.policies.nothing}], ids=["", "remat"])
@pytest.mark.parametrize("loss", [loss_fn, looking])
def test_remat_and_the_dynamic_rung(loss: Any, options: Any) -> None:
    oracle = dense({"shard": 2}, 1, 2)
    given = {"precision": MIXED} | options
    for _, _, leaves, _ in ranks(2, train, 1, loss, None, given):
        assert_equal(leaves, oracle.tensors)


def test_processes_equal_virtual_ranks() -> None:
    def bits(results: list[Any]) -> list[Any]:
        return [(grads, leaves) for grads, _, leaves, _ in results]

    virtual = bits(ranks(3, train, 2, loss_fn, None, {"precision": MIXED}))
    real = run_ranks(3, train_plain, 2, {"precision": MIXED})
    for (grads, leaves), (others, after) in zip(virtual, real, strict=True):
        assert_equal(grads, others)
        assert_equal(leaves, after)


def train_plain(mesh: zfunc.Mesh, accum: int, options: Any) -> Any:
    grads, _, leaves, _ = train(mesh, accum, loss_fn, None, options)
    return grads, leaves


STORED = Precision(param=BF16, compute=BF16, reduce=FP32, output=FP32, batch=BF16)


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_masters_of_narrow_leaves(axes: Any, stage: int) -> None:
    """The master is what a float32 run would have; the leaf is its cast."""
    oracle = dense(axes, 1, 2)
    options = {"precision": STORED, "specs": zfunc.zero(stage)}
    exact = [x for x in oracle.tensors if x.is_floating_point()]
    for leaves, masters in ranks(axes, train_masters, options):
        assert_equal(leaves, [x.to(BF16) if x.is_floating_point() else x for x in oracle.tensors])
        assert_equal(masters, exact)


def train_masters(mesh: zfunc.Mesh, options: Any) -> Any:
    _, _, leaves, state = train(mesh, 1, loss_fn, None, options)
    return leaves, gathered(state.opt_state.masters)


def master_run(mesh: zfunc.Mesh, precision: Any, spec: Any) -> Any:
    step = zfunc.shard(loss_fn, mesh, precision=precision, specs=spec)
    state = step.init(params(), optim.adamw(0.01))
    for number in range(3):
        state, _ = step(state, batch(mesh.rank, number))
    return (
        gathered(state.opt_state.masters),
        gathered(state.params),
        gathered(state.opt_state.state),
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adam_works_on_masters(stage: int) -> None:
    axes = {"shard": 2}
    oracle = Oracle(by_hand, params(), Adamw(0.01), axes=axes)
    for number in range(3):
        oracle.step(rows(axes, 1, number))
    exact = [x for x in oracle.tensors if x.is_floating_point()]
    for masters, leaves, state in ranks(2, master_run, STORED, zfunc.zero(stage)):
        assert_equal(masters, exact, 1e-5)
        assert_equal([x for x in leaves if x.is_floating_point()], [x.to(BF16) for x in masters])
        assert all(x.dtype == FP32 for x in state if x.is_floating_point())


def traffic(mesh: zfunc.Mesh, precision: Any) -> tuple[int, list[torch.dtype], int]:
    """Payload bytes of a step, the dtypes of what travels, the predicted peak of live bytes."""
    step = zfunc.shard(loss_fn, mesh, precision=precision)
    state = step.init(params(), optim.sgd(RATE))
    lowered = step.lower(state, batch(mesh.rank, 0))
    comm: Any = mesh.comm
    before = comm.stats().payload_bytes
    step(state, batch(mesh.rank, 0))
    program = lowered.program
    values = [
        op.outs if isinstance(op, Gather) else op.ins
        for op in program.ops
        if isinstance(op, Gather | Reduce)
    ]
    dtypes = [program.values[v].spec.dtype for group in values for v in group]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    peak = lowered.memory_analysis().peak_live_bytes
    return comm.stats().payload_bytes - before, floating, peak


def test_leaves_and_gradients_travel_in_the_dtype_of_the_computation() -> None:
    for (plain, _, most), (mixed, dtypes, least) in zip(
        ranks(2, traffic, None), ranks(2, traffic, MIXED), strict=True
    ):
        assert set(dtypes) == {BF16}
        table = 8 * 4 // 2  # the integer leaf
        assert mixed - table == (plain - table) // 2
        assert least < most


def test_sums_are_taken_in_the_wider_dtype() -> None:
    """1 + 2**-9 rounds to 1 in bfloat16, on the way and in a sum; in float32 it does not."""

    def run(mesh: zfunc.Mesh, reduce: torch.dtype) -> Tensor:
        precision = Precision(compute=BF16, reduce=reduce)
        step = zfunc.shard(lambda p, b: (p["w"] * b).sum(), mesh, precision=precision)
        scale = torch.tensor([1.0, 2.0**-9])[mesh.rank].to(BF16)
        shares = zfunc.scatter({"w": torch.ones(3)}, mesh, zfunc.Flat())
        return zfunc.gather(step.value_and_grad(shares, scale)[1])["w"]

    for wide, narrow in zip(ranks(2, run, FP32), ranks(2, run, BF16), strict=True):
        assert wide.dtype == FP32 and wide.tolist() == [(1.0 + 2.0**-9) / 2] * 3
        assert narrow.dtype == BF16 and narrow.tolist() == [0.5] * 3


def test_a_leaf_of_its_own_precision() -> None:
    """A prefix tree: the gain stays in float32 in the loss."""
    plain = Precision(output=FP32, batch=BF16)
    tree_of = {name: MIXED for name in ("embed", "hidden", "unused", "table", "name")}

    def some(p: Any, b: Any) -> Tensor:
        own = cast(p, BF16) | {"gain": p["gain"]}
        return loss_mixed(own, cast(b, BF16)).float()

    def loss_mixed(p: Any, b: Any) -> Tensor:
        h = torch.relu(torch.tanh(b["x"] @ p["embed"]) @ p["hidden"]) * p["gain"]
        return h.square().mean()

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss_mixed, mesh, precision=tree_of | {"gain": plain})
        state = step.init(params(), optim.sgd(RATE))
        for number in range(2):
            state, _ = step(state, batch(mesh.rank, number))
        return gathered(state.params)

    oracle = dense({"shard": 2}, 1, 2, some)
    for leaves in ranks(2, run):
        assert_equal(leaves, oracle.tensors)


def moving(mesh: zfunc.Mesh) -> Any:
    """A float32 run goes on with narrow leaves and masters, and comes back."""
    full = zfunc.shard(loss_fn, mesh, precision=MIXED)
    narrow = zfunc.shard(loss_fn, mesh, precision=STORED, specs=zfunc.zero(1))
    back = zfunc.shard(loss_fn, mesh, precision=dataclasses.replace(MIXED, param=FP32))
    state = full.init(params(), optim.adamw(0.01))
    for number, step in enumerate((full, narrow, back)):
        state = step.adopt(state) if number else state
        state, _ = step(state, batch(mesh.rank, number))
    return gathered(state.params)


def test_adopt_keeps_every_bit_of_a_master() -> None:
    def straight(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss_fn, mesh, precision=MIXED)
        state = step.init(params(), optim.adamw(0.01))
        for number in range(3):
            state, _ = step(state, batch(mesh.rank, number))
        return gathered(state.params)

    for got, expected in zip(ranks(2, moving), ranks(2, straight), strict=True):
        assert_equal(got, expected)


def test_narrow_without_masters_trains_as_plain_torch_would() -> None:
    precision = Precision(param=BF16, output=FP32, batch=BF16, master=False)
    narrow = cast(params(), BF16)
    oracle = Oracle(by_hand, narrow, Sgd(RATE), axes={"shard": 2})
    for number in range(2):
        oracle.step(rows({"shard": 2}, 1, number))
    for _, _, leaves, state in ranks(2, train, 1, loss_fn, None, {"precision": precision}):
        assert_equal(leaves, oracle.tensors)
        assert not hasattr(state.opt_state, "masters")


def test_infer_computes_and_answers_in_its_dtypes() -> None:
    def run(mesh: zfunc.Mesh) -> Tensor:
        state = zfunc.shard(loss_fn, mesh).init(params(), optim.sgd(RATE))
        return zfunc.infer(lambda p, x: x @ p["embed"], mesh, precision=MIXED)(
            state.params, batch(0, 0)["x"]
        )

    expected = (batch(0, 0)["x"].to(BF16) @ params()["embed"].to(BF16)).float()
    for out in ranks(2, run):
        assert_equal([out], [expected])


def test_lower_counts_masters_and_narrow_leaves() -> None:
    def sizes(precision: Any) -> zfunc.program.Memory:
        step = zfunc.shard(loss_fn, zfunc.abstract_mesh({"shard": 2}), precision=precision)
        state = step.abstract(params(), optim.sgd(RATE))
        return step.lower(state, {"x": zfunc.ShapeDtype((2, 6), FP32)}).memory_analysis()

    numel = sum(x.numel() for x in tree.leaves(params()) if isinstance(x, Tensor)) - 4
    full, narrow = sizes(MIXED), sizes(STORED)
    assert full.unsharded_params_bytes - narrow.unsharded_params_bytes == 2 * numel
    assert narrow.unsharded_opt_bytes - full.unsharded_opt_bytes == 4 * numel


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp17", "'fp32', 'bf16', 'fp16' or Precision"),
        (16, "precision has 16"),
        ({"w": MIXED}, "precision is not a prefix"),
        (
            {"embed": MIXED, "rest": dataclasses.replace(MIXED, batch=None)},
            "differs between leaves in batch",
        ),
    ],
    ids=str,
)
def test_what_is_no_precision(precision: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step = zfunc.shard(loss_fn, zfunc.mesh(), precision=precision)
        step.init(params(), optim.sgd(RATE))


@pytest.mark.parametrize("dtype", [torch.int32, "bf16", torch.complex64])
def test_a_dtype_that_is_no_real_float(dtype: Any) -> None:
    with pytest.raises(zfunc.LayoutError, match="compute="):
        Precision(compute=dtype)
