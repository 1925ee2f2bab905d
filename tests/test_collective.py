"""gather and scatter: what they give, each other's transposes, inside and outside a function."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.harness import assert_equal, examples, integers, ranks
from tests.oracle import Oracle, Sgd, sum_over_ranks
from zfunc import optim, tree

HSDP = {"replica": 2, "shard": 2}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def drawn(shape: Any, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return integers(torch.Generator().manual_seed(seed), shape, dtype)


@examples(0.6)
@given(SHAPES, st.sampled_from(DTYPES), st.sampled_from([1, 2, 3, 4, 7]), st.booleans())
def test_gather_undoes_scatter(shape: Any, dtype: torch.dtype, world: int, flat: bool) -> None:
    full = {"a": drawn(shape, 0, dtype), "rest": [drawn((3,), 1), 5, None]}

    def run(mesh: zfunc.Mesh) -> None:
        spec = {"a": zfunc.Flat() if flat else zfunc.P(), "rest": zfunc.Flat()}
        pieces = zfunc.scatter(full, mesh, spec)
        local = pieces["a"].local
        assert local.numel() <= math.ceil(full["a"].numel() / world) or not flat
        back = zfunc.gather(pieces)
        assert torch.equal(back["a"], full["a"]) and back["a"].dtype == dtype
        assert torch.equal(back["rest"][0], full["rest"][0])
        assert back["rest"][1:] == [5, None]

    ranks(world, run)


@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 3}, HSDP], ids=str)
@pytest.mark.parametrize("spec", [zfunc.Flat(), zfunc.P()], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_scatter_sums_over_the_axis_or_all_ranks(axes: Any, spec: Any, reduce: str) -> None:
    world = math.prod(axes.values())
    fulls = [drawn((2, 5), rank) for rank in range(world)]

    def run(mesh: zfunc.Mesh) -> Tensor:
        return zfunc.gather(zfunc.scatter(fulls[mesh.rank], mesh, spec, reduce=reduce))

    for rank, got in enumerate(ranks(axes, run)):
        same_replica = [r for r in range(world) if r // axes["shard"] == rank // axes["shard"]]
        chosen = same_replica if isinstance(spec, zfunc.Flat) else list(range(world))
        expected = sum((fulls[r] for r in chosen), torch.zeros(2, 5).double())
        assert torch.equal(got, expected / (len(chosen) if reduce == "mean" else 1))


def dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("numel", [0, 1, 7])
def test_gather_and_scatter_sum_are_adjoint(world: int, numel: int) -> None:
    """<gather(x), y> = <x, scatter_sum(y)>, summed over ranks; backward is that adjoint."""

    def run(mesh: zfunc.Mesh) -> tuple[float, float, Tensor, Tensor]:
        x = zfunc.scatter(drawn((numel,), 9), mesh, zfunc.Flat())
        piece = x.local.requires_grad_()
        full = zfunc.gather(zfunc.Sharded(piece, x.layout))
        y = drawn((numel,), mesh.rank)
        full.backward(y)
        summed = zfunc.scatter(y, mesh, zfunc.Flat(), reduce="sum").local
        return dot(full.detach(), y), dot(piece.detach(), summed), piece.grad, summed

    results = ranks(world, run)
    assert sum(row[0] for row in results) == sum(row[1] for row in results)
    for _, _, grad, summed in results:
        assert torch.equal(grad, summed)


@pytest.mark.parametrize(
    ("spec", "reduce"),
    [
        (zfunc.Flat(), "slice"),
        (zfunc.Flat(), "sum"),
        (zfunc.Flat(), "mean"),
        (zfunc.P(), "sum"),
        (zfunc.P(), "mean"),
        (zfunc.P(), "slice"),
    ],
    ids=str,
)
@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 2}, HSDP], ids=str)
def test_every_scatter_transposes_exactly(axes: Any, spec: Any, reduce: str) -> None:
    """sum_r <A x_r, y_r> = sum_r <x_r, A^T y_r> for the A that scatter is."""

    def run(mesh: zfunc.Mesh) -> tuple[float, float]:
        x = drawn((5,), mesh.rank).requires_grad_()
        out = zfunc.scatter(x, mesh, spec, reduce=reduce).local
        y = drawn(out.shape, 10 + mesh.rank)
        (grad,) = torch.autograd.grad(out, x, y)
        return dot(out.detach(), y), dot(x.detach(), grad)

    results = ranks(axes, run)
    assert sum(row[0] for row in results) == sum(row[1] for row in results)


def test_a_mean_and_a_slice_transpose_as_promised() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        x = torch.ones(5).double().requires_grad_()
        out = zfunc.scatter(x, mesh, zfunc.Flat(), reduce="mean").local
        (grad,) = torch.autograd.grad(out, x, torch.full_like(out, 1.0 + mesh.rank))
        assert grad.tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]
        out = zfunc.scatter(x, mesh, zfunc.Flat()).local
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert grad.tolist() == ([1, 1, 1, 0, 0] if mesh.rank == 0 else [0, 0, 0, 1, 1])

    ranks(2, run)


def test_gather_casts_before_it_communicates() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        x = zfunc.scatter({"w": torch.randn(9)}, mesh, zfunc.Flat())
        before = mesh.comm.stats().payload_bytes
        half = zfunc.gather(x, torch.bfloat16)["w"]
        middle = mesh.comm.stats().payload_bytes
        full = zfunc.gather(x)["w"]
        after = mesh.comm.stats().payload_bytes
        assert half.dtype == torch.bfloat16 and torch.equal(half, full.bfloat16())
        assert 2 * (middle - before) == after - middle

    ranks(2, run)


def test_gathering_a_tree_is_one_message_to_each_peer() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        x = zfunc.scatter([torch.ones(7) for _ in range(50)], mesh, zfunc.Flat())
        before = mesh.comm.stats().messages
        zfunc.gather(x)
        assert mesh.comm.stats().messages - before == 2

    ranks(3, run)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch.func.jvp's own
def test_vmap_and_forward_mode_are_refused() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        x = zfunc.scatter(torch.ones(4), mesh, zfunc.Flat())

        def whole(piece: Tensor) -> Tensor:
            return zfunc.gather(zfunc.Sharded(piece, x.layout))

        def cut(full: Tensor) -> Tensor:
            return zfunc.scatter(full, mesh, zfunc.Flat(), reduce="sum").local

        for fn, argument in ((whole, x.local), (cut, torch.ones(4))):
            with pytest.raises(RuntimeError):
                torch.func.vmap(fn)(torch.stack([argument, argument]))
            with pytest.raises(RuntimeError):
                torch.func.jvp(fn, (argument,), (torch.ones_like(argument),))

    ranks(2, run)


def test_what_cannot_be_scattered_or_gathered() -> None:
    mesh = zfunc.mesh()
    with pytest.raises(zfunc.LayoutError, match=r"'slice', 'sum' or 'mean'"):
        zfunc.scatter(torch.ones(2), mesh, zfunc.Flat(), reduce="max")
    with pytest.raises(zfunc.LayoutError, match=r"did you mean 'shard'"):
        zfunc.scatter(torch.ones(2), mesh, zfunc.Flat("shrad"))
    with pytest.raises(ValueError, match=r"not a prefix"):
        zfunc.scatter({"a": torch.ones(2)}, mesh, {"b": zfunc.Flat()})
    abstract = zfunc.abstract_mesh({"shard": 2})
    piece = zfunc.scatter(torch.ones(4), abstract, zfunc.Flat())
    with pytest.raises(zfunc.LayoutError, match=r"(?s)abstract.*zfunc.mesh"):
        zfunc.gather(piece)


# Inside a loss.


def normalised_loss(mesh: zfunc.Mesh, p: Tensor, batch: Tensor) -> Tensor:
    """A loss whose ranks share statistics: the sum of everyone's outputs."""
    out = torch.relu(p * batch)
    shared = zfunc.gather(zfunc.scatter(out, mesh, zfunc.Flat(), reduce="sum"))
    return (shared * batch).sum() + (out * out).sum()


def dense_normalised(p: Tensor, batches: list[Tensor], group: int) -> Tensor:
    """The sum of all losses; every `group` ranks in a row share."""
    outs = [torch.relu(p * batch) for batch in batches]
    starts = range(0, len(outs), group)
    sums = [sum_over_ranks(outs[start : start + group], [group]) for start in starts]
    losses = [
        (sums[rank // group] * batch).sum() + (outs[rank] * outs[rank]).sum()
        for rank, batch in enumerate(batches)
    ]
    return functools.reduce(torch.add, losses)


@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 2}, {"shard": 3}, HSDP], ids=str)
@pytest.mark.parametrize("remat", [None, zfunc.policies.nothing], ids=["kept", "remat"])
def test_collectives_in_a_loss_transpose_exactly(axes: Any, remat: Any) -> None:
    world, start = math.prod(axes.values()), drawn((5,), 50)
    batches = [drawn((5,), rank) for rank in range(world)]
    p = start.clone().requires_grad_()
    total = dense_normalised(p, batches, axes["shard"])
    (grad,) = torch.autograd.grad(total, p)
    expected, loss = grad / world, float(total.detach()) / world

    def run(mesh: zfunc.Mesh) -> tuple[Tensor, Tensor]:
        step = zfunc.shard(functools.partial(normalised_loss, mesh), mesh, remat=remat)
        state = step.init(start, optim.sgd(0.5))
        value, grads = step.value_and_grad(state.params, batches[mesh.rank])
        return value, zfunc.gather(grads)

    for value, grads in ranks(axes, run):
        assert float(value) == loss
        assert torch.equal(grads, expected)


@pytest.mark.parametrize("spec", [zfunc.Flat(), zfunc.P()], ids=str)
def test_a_sharded_teacher_in_the_batch(spec: Any) -> None:
    """Distillation: the teacher arrives in pieces, is read with gather, and has no gradient."""
    teacher, student = {"w": drawn((3, 5), 0)}, {"w": drawn((3, 5), 1)}
    data = [[drawn((4, 3), rank)] for rank in range(2)]

    def loss_with(target: Any, params: Any, x: Tensor) -> Tensor:
        return ((x @ params["w"] - x @ target["w"]) ** 2).sum()

    oracle = Oracle(functools.partial(loss_with, teacher), student, Sgd(2.0**-8), axes={"shard": 2})
    expected = oracle.step(data)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return loss_with(zfunc.gather(batch["teacher"]), params, batch["x"])

    def run(mesh: zfunc.Mesh) -> tuple[float, Tensor, bool]:
        step = zfunc.shard(loss_fn, mesh)
        pieces = zfunc.scatter(teacher, mesh, spec)
        kept = pieces["w"].local.clone()
        state = step.init(student, optim.sgd(2.0**-8))
        batch = {"teacher": pieces, "x": data[mesh.rank][0]}
        state, metrics = step(state, batch)
        same = torch.equal(pieces["w"].local, kept)
        return float(metrics["loss"]), zfunc.gather(state.params)["w"], same

    for loss, after, same in ranks(2, run):
        assert same
        assert loss == expected.loss
        assert torch.equal(after, oracle.params["w"])


def test_sharded_arguments_of_every_micro_batch() -> None:
    teachers = [{"w": drawn((3, 5), micro)} for micro in range(2)]
    student = {"w": drawn((3, 5), 7)}
    data = [[(teachers[micro], drawn((4, 3), rank)) for micro in range(2)] for rank in range(2)]

    def dense(params: Any, batch: Any) -> Tensor:
        teacher, x = batch
        return ((x @ params["w"] - x @ teacher["w"]) ** 2).sum()

    oracle = Oracle(dense, student, Sgd(2.0**-8), axes={"shard": 2})
    oracle.step(data)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return dense(params, (zfunc.gather(batch[0]), batch[1]))

    def run(mesh: zfunc.Mesh) -> Tensor:
        step = zfunc.shard(loss_fn, mesh, accum=2)
        pieces = [zfunc.scatter(teacher, mesh, zfunc.Flat()) for teacher in teachers]
        batch = [(piece, x) for piece, (_, x) in zip(pieces, data[mesh.rank], strict=True)]
        state, _ = step(step.init(student, optim.sgd(2.0**-8)), batch)
        return zfunc.gather(state.params)["w"]

    for after in ranks(2, run):
        assert torch.equal(after, oracle.params["w"])


def test_an_average_of_parameters_is_made_on_pieces() -> None:
    """An EMA needs no communication, and trains as a teacher of the next step."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return ((params["w"] - zfunc.gather(batch)["w"]) ** 2).sum() + params["w"].sum()

    def run(mesh: zfunc.Mesh) -> tuple[Tensor, Tensor]:
        step = zfunc.shard(loss_fn, mesh)
        state = step.init({"w": torch.arange(5.0)}, optim.sgd(0.25))
        average = tree.map(torch.clone, state.params)
        for _ in range(3):
            state, _ = step(state, average)
            average = tree.map(lambda a, p: 0.5 * a + 0.5 * p, average, state.params)
        return zfunc.gather(state.params)["w"], zfunc.gather(average)["w"]

    w, average = torch.arange(5.0), torch.arange(5.0)
    for _ in range(3):
        w = w - 0.25 * (2 * (w - average) + 1)
        average = 0.5 * average + 0.5 * w
    for got in ranks(3, run):
        assert_equal(got, [w, average])


def test_the_parameters_themselves_as_an_argument() -> None:
    """An argument may share its pieces with the state: it is read before the state is written."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return ((params["w"] - 2 * zfunc.gather(batch)["w"]) ** 2).sum()

    def run(mesh: zfunc.Mesh) -> Tensor:
        step = zfunc.shard(loss_fn, mesh)
        state = step.init({"w": torch.arange(4.0)}, optim.sgd(0.5))
        state, _ = step(state, state.params)
        return zfunc.gather(state.params)["w"]

    for after in ranks(2, run):
        assert after.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_sharded_argument_does_not_enter_math_by_accident() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(lambda p, b: (p * b).sum(), mesh)
        state = step.init(torch.ones(4), optim.sgd(0.5))
        with pytest.raises(zfunc.LayoutError, match=r"(?s)batch entered tensor math.*zfunc.gather"):
            step(state, zfunc.scatter(torch.ones(4), mesh, zfunc.Flat()))

    ranks(2, run)
