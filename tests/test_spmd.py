"""spmd and infer: any function of whole parameters, on pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc
from tests.checker import check
from tests.harness import assert_equal, bits, integers, ranks
from zfunc import optim, random, tree
from zfunc.sharded import is_sharded


def params() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    layers = [{"w": integers(generator, (4, 4)), "b": integers(generator, (4,))} for _ in range(3)]
    return {"layers": layers, "out": integers(generator, (4, 3)), "scale": 2.0}


def apply_fn(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = torch.relu(x @ layer["w"] + layer["b"])
    return x @ params["out"] * params["scale"]


def loss_fn(params: Any, batch: Any) -> Tensor:
    x, y = batch
    return ((apply_fn(params, x) - y) ** 2).mean()


def inputs(rank: int, rows: int = 5) -> Tensor:
    return integers(torch.Generator().manual_seed(10 + rank), (rows, 4))


def sharded(mesh: zfunc.Mesh, specs: Any = zfunc.Flat()) -> Any:  # noqa: B008
    return zfunc.scatter(params(), mesh, specs)


SPECS = [zfunc.Flat(), zfunc.P(), {"layers": zfunc.Flat(), "out": zfunc.P(), "scale": zfunc.P()}]


@pytest.mark.parametrize("specs", SPECS, ids=["flat", "whole", "mixed"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_infer_equals_the_function(world: int, specs: Any) -> None:
    def run(mesh: zfunc.Mesh) -> tuple[Tensor, bool]:
        forward = zfunc.infer(apply_fn, mesh)
        pieces = sharded(mesh, specs)
        kept = bits(pieces)
        out = forward(pieces, inputs(mesh.rank))
        again = forward(pieces, inputs(mesh.rank))
        assert forward.explain().misses == 1
        assert_equal(bits(pieces), kept)
        return out, torch.equal(out, again)

    for rank, (out, same) in enumerate(ranks(world, run)):
        assert torch.equal(out, apply_fn(params(), inputs(rank))) and same


def test_infer_under_the_smallest_budget_passes_the_checker() -> None:
    def run(mesh: zfunc.Mesh) -> Tensor:
        pieces = sharded(mesh)
        tight = zfunc.infer(apply_fn, mesh, prefetch=zfunc.Prefetch(live_bytes=0))
        with pytest.raises(zfunc.BudgetError) as refused:
            tight(pieces, inputs(mesh.rank))
        least = zfunc.Prefetch(live_bytes=refused.value.needed_bytes)
        forward = zfunc.infer(apply_fn, mesh, prefetch=least)
        check(forward.lower(pieces, inputs(mesh.rank)).program)
        return forward(pieces, inputs(mesh.rank))

    for rank, out in enumerate(ranks(2, run)):
        assert torch.equal(out, apply_fn(params(), inputs(rank)))


def test_batches_of_other_sizes_on_every_rank() -> None:
    def run(mesh: zfunc.Mesh) -> list[Tensor]:
        forward = zfunc.infer(apply_fn, mesh)
        pieces = sharded(mesh)
        return [forward(pieces, inputs(mesh.rank, rows)) for rows in (mesh.rank, 3, 0)]

    for rank, outs in enumerate(ranks(3, run)):
        for out, rows in zip(outs, (rank, 3, 0), strict=True):
            assert torch.equal(out, apply_fn(params(), inputs(rank, rows)))


def test_training_and_evaluation_alternate() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        step, forward = zfunc.shard(loss_fn, mesh), zfunc.infer(apply_fn, mesh)
        state = step.init(params(), optim.sgd(2.0**-12))
        batch = inputs(mesh.rank), torch.ones(5, 3).double()
        for _ in range(4):
            out = forward(state.params, batch[0])
            assert torch.equal(out, apply_fn(zfunc.gather(state.params), batch[0]))
            state, _ = step(state, batch)
        assert (step.explain().misses, forward.explain().misses) == (1, 1)

    ranks(2, run)


def tangent() -> Any:
    generator = torch.Generator().manual_seed(3)
    return tree.map(
        lambda x: integers(generator, x.shape) if isinstance(x, Tensor) else x, params()
    )


def hvp(params: Any, direction: Any, batch: Any) -> Any:
    """The Hessian of the loss times a direction, reverse over reverse."""
    leaves, structure = tree.flatten(params)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def of(tensors: tuple[Tensor, ...]) -> Tensor:
        filled = list(leaves)
        for i, tensor in zip(where, tensors, strict=True):
            filled[i] = tensor
        return loss_fn(tree.unflatten(structure, filled), batch)

    def slope(tensors: tuple[Tensor, ...]) -> Tensor:
        grads = torch.func.grad(of)(tensors)
        given = [x for x in tree.leaves(direction) if isinstance(x, Tensor)]
        return sum(((g * v).sum() for g, v in zip(grads, given, strict=True)), torch.zeros(()))

    made = iter(torch.func.grad(slope)(tuple(leaves[i] for i in where)))
    return tree.unflatten(
        structure, [next(made) if i in where else x for i, x in enumerate(leaves)]
    )


@pytest.mark.parametrize("world", [1, 2])
def test_a_hessian_vector_product_with_pieces_as_result(world: int) -> None:
    def run(mesh: zfunc.Mesh) -> tuple[list[Tensor], Any]:
        batch = inputs(0), torch.ones(5, 3).double()
        product = zfunc.spmd(
            lambda p, v, b: hvp(p, zfunc.gather(v), b), mesh, out_specs=zfunc.Flat()
        )
        direction = zfunc.scatter(tangent(), mesh, zfunc.Flat())
        out = product(sharded(mesh), direction, batch)
        assert all(is_sharded(x) for x in tree.leaves(out["layers"], is_leaf=is_sharded))
        whole = zfunc.gather(out)
        return [x for x in tree.leaves(whole) if isinstance(x, Tensor)], whole["scale"]

    expected = hvp(params(), tangent(), (inputs(0), torch.ones(5, 3).double()))
    for got, scale in ranks(world, run):
        assert_equal(got, [x for x in tree.leaves(expected) if isinstance(x, Tensor)])
        assert scale == 2.0


def test_out_specs_are_a_prefix_tree() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        def statistics(p: Any) -> Any:
            return {"norms": [x.norm() for x in tree.leaves(p["layers"])], "copy": p["out"] * 1}

        specs = {"norms": zfunc.P(), "copy": zfunc.Flat()}
        out = zfunc.spmd(statistics, mesh, out_specs=specs)(sharded(mesh))
        assert all(isinstance(x, Tensor) for x in out["norms"])
        assert_equal(out["norms"], [x.norm() for x in tree.leaves(params()["layers"])])
        assert out["copy"].layout.axis == "shard"
        assert torch.equal(zfunc.gather(out["copy"]), params()["out"])

    ranks(2, run)


def test_results_do_not_share_memory_with_parameters() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        pieces = sharded(mesh, zfunc.P())
        kept = bits(pieces)
        for spec in (zfunc.P(), zfunc.Flat()):
            out = zfunc.spmd(lambda p: [p["out"], p["out"].t()], mesh, out_specs=spec)(pieces)
            for leaf in tree.leaves(out):
                leaf.zero_()
            assert_equal(bits(pieces), kept)

    ranks(1, run)
    ranks(2, run)


def test_scatter_in_a_function_sums_over_ranks() -> None:
    def run(mesh: zfunc.Mesh) -> Tensor:
        def total(p: Any, x: Tensor) -> Tensor:
            out = apply_fn(p, x).sum(0)
            return zfunc.gather(zfunc.scatter(out, mesh, zfunc.Flat(), reduce="sum"))

        return zfunc.spmd(total, mesh)(sharded(mesh), inputs(mesh.rank))

    expected = sum(apply_fn(params(), inputs(rank)).sum(0) for rank in range(3))
    for got in ranks(3, run):
        assert torch.equal(got, expected)


def test_static_arguments_are_part_of_the_signature() -> None:
    def scaled(p: Any, x: Tensor, factor: Any) -> Tensor:
        return x @ p["out"] * factor

    def run(mesh: zfunc.Mesh) -> None:
        forward = zfunc.infer(scaled, mesh)
        pieces = sharded(mesh)
        for factor, misses in ((2, 1), (3, 2), (2.0, 3), (True, 4), (2, 4)):
            got = forward(pieces, inputs(0), factor)
            assert torch.equal(got, scaled(params(), inputs(0), factor))
            assert forward.explain().misses == misses

    ranks(2, run)


def test_static_leaves_of_parameters_are_part_of_the_signature() -> None:
    numpy = pytest.importorskip("numpy")

    def run(mesh: zfunc.Mesh) -> None:
        forward, step = zfunc.infer(apply_fn, mesh), zfunc.shard(loss_fn, mesh)
        batch = inputs(0), torch.ones(5, 3).double()
        for scale in (2.0, 3.0, numpy.float32(2), numpy.float32(4), 1, True, 0.0, -0.0):
            pieces = sharded(mesh) | {"scale": scale}
            whole = params() | {"scale": scale}
            out = forward(pieces, batch[0])
            assert torch.equal(out, apply_fn(whole, batch[0]))
            assert torch.equal(out.signbit(), apply_fn(whole, batch[0]).signbit())
            assert float(step.value_and_grad(pieces, batch)[0]) == float(loss_fn(whole, batch))

    ranks(2, run)


def test_an_exception_on_one_rank_reaches_all() -> None:
    def run(mesh: zfunc.Mesh) -> str:
        def fails(p: Any, x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                raise KeyError("odd batch")
            return apply_fn(p, x)

        forward = zfunc.infer(fails, mesh)
        pieces = sharded(mesh)
        with pytest.raises((KeyError, zfunc.RemoteRankError)) as caught:
            forward(pieces, inputs(0, 1 + mesh.rank))
        out = forward(pieces, inputs(0))
        assert torch.equal(out, apply_fn(params(), inputs(0)))
        return type(caught.value).__name__

    assert ranks(2, run) == ["KeyError", "RemoteRankError"]


def test_an_exception_inside_a_collective_function_reaches_all() -> None:
    """The rank that fails goes on communicating; no rank takes its zeros for results."""

    def run(mesh: zfunc.Mesh) -> str:
        def shared(p: Any, x: Tensor, index: Tensor) -> Tensor:
            rows = F.embedding(index, p["out"])
            return zfunc.gather(zfunc.scatter(rows, mesh, zfunc.Flat(), reduce="sum"))

        forward = zfunc.spmd(shared, mesh)
        pieces = sharded(mesh)
        bad = torch.tensor([9 if mesh.rank == 1 else 0])
        with pytest.raises((IndexError, RuntimeError)) as caught:
            forward(pieces, inputs(0), bad)
        out = forward(pieces, inputs(0), torch.tensor([0]))
        assert torch.equal(out, params()["out"][:1] * 2)
        return type(caught.value).__name__

    one, other = ranks(2, run)
    assert (one, other) == ("RemoteRankError", "IndexError")


def test_a_gradient_over_a_batch_needs_no_step() -> None:
    """Per-example gradients by vmap: parameters arrive whole, so any transform works."""

    def per_example(p: Any, x: Tensor) -> Tensor:
        def one(out: Tensor, row: Tensor) -> Tensor:
            return (apply_fn(p | {"out": out}, row[None]) ** 2).sum()

        return torch.func.vmap(torch.func.grad(one), (None, 0))(p["out"], x)

    def run(mesh: zfunc.Mesh) -> Tensor:
        return zfunc.spmd(per_example, mesh)(sharded(mesh), inputs(mesh.rank))

    for rank, got in enumerate(ranks(2, run)):
        assert torch.equal(got, per_example(params(), inputs(rank)))


def test_nothing_runs_on_an_abstract_mesh() -> None:
    mesh = zfunc.abstract_mesh({"shard": 2})
    forward = zfunc.infer(apply_fn, mesh)
    assert forward.lower(sharded(mesh), inputs(0)).program.mode == "forward"
    with pytest.raises(zfunc.LayoutError, match=r"(?s)abstract.*zfunc.mesh"):
        forward(sharded(mesh), inputs(0))


def test_inputs_that_require_gradients_leave_no_graph_behind() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        x = inputs(0).requires_grad_()
        out = zfunc.infer(apply_fn, mesh)(sharded(mesh), x)
        assert not out.requires_grad and out.grad_fn is None

    ranks(2, run)


def test_draws_by_key_do_not_depend_on_the_mesh() -> None:
    def noisy(p: Any, key: Tensor) -> Tensor:
        return random.normal(key, (3,)) + p["out"].sum()

    for world in (1, 2, 3):
        for got in ranks(
            world, lambda mesh: zfunc.infer(noisy, mesh)(sharded(mesh), random.key(3))
        ):
            assert torch.equal(got, noisy(params(), random.key(3)))
