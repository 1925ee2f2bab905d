"""The executor: the program as it stands, in segments of any length; only results are left."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc
from tests.harness import assert_equal, integers, ranks
from zfunc import optim
from zfunc.execute import Executor, Inputs, Outcome, sum_over_ranks
from zfunc.layout import Layout
from zfunc.program.ir import Compute, Program, Rng
from zfunc.sharded import is_sharded
from zfunc.tree import leaves


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: integers(generator, (4, 4)) for name in "abc"}


@zfunc.remat
def block(h: Tensor, w: Tensor) -> Tensor:
    return F.dropout(torch.relu(h @ w), 0.5)


def loss_fn(params: Any, batch: Tensor) -> Any:
    h = batch
    for w in params.values():
        h = block(h, w.t())
    return h.square().mean(), {"h": h}


def execute(mesh: zfunc.Mesh, max_segment_ops: int | None) -> tuple[Program, Outcome, list[Any]]:
    """Runs the gradient program by hand; the gradients that the update was given."""
    step = zfunc.shard(loss_fn, mesh, has_aux=True)
    state = step.init(params(), optim.sgd(0.5))
    batch = integers(torch.Generator().manual_seed(mesh.rank), (3, 4))
    program = step.lower(state, batch).program
    executor = Executor(program, mesh, max_segment_ops=max_segment_ops)
    given: list[Any] = []
    pieces = [leaf.local for leaf in leaves(state.params, is_leaf=is_sharded)]
    torch.manual_seed(mesh.rank)
    outcome = executor.run(
        Inputs(pieces, [[batch]], [None], update=lambda grads, _: given.extend(grads))
    )
    return program, outcome, given


@pytest.mark.parametrize("world", [1, 2])
def test_segments_of_any_length_give_the_same_bits(world: int) -> None:
    whole, *others = ([row[2] for row in ranks(world, execute, n)] for n in (None, 1, 2, 7))
    for other in others:
        for got, expected in zip(other, whole, strict=True):
            assert len(got) == 3
            assert_equal(got, expected)


@pytest.mark.parametrize("max_segment_ops", [None, 1, 3])
def test_only_results_are_left(max_segment_ops: int | None) -> None:
    for program, outcome, _ in ranks(2, execute, max_segment_ops):
        (micro,) = program.micros
        results = {micro.loss, *micro.aux}
        results |= {grad for grad in program.ops[-2].grads if grad is not None}
        left = {value for value, tensor in enumerate(outcome.env) if tensor is not None}
        assert results <= left <= results | {*micro.inputs, *program.constants}
        assert outcome.error is None and outcome.waited_s >= 0


def test_recomputation_draws_the_numbers_of_the_forward_pass() -> None:
    for program, _, _ in ranks(1, execute, None):
        actions = [op.action for op in program.ops if isinstance(op, Rng)]
        assert actions.count("record") == actions.count("replay") == actions.count("restore") >= 2
        assert any(isinstance(op, Compute) and op.phase == "recompute" for op in program.ops)


def odd_arguments(p: Any, x: Tensor) -> Tensor:
    """Infinities, NaN, lists, dtypes, memory formats, negative zeros and strings as arguments."""
    y = x.masked_fill(x < 0, -math.inf).clamp(min=-1e30)
    y = F.pad(y, [1, 0, 0, 1], value=math.nan).nan_to_num(0.0, math.inf, -math.inf)
    y = y + torch.full((1,), -0.0, dtype=torch.float64)
    z = y.reshape(1, 1, *y.shape).contiguous(memory_format=torch.channels_last)
    z = F.interpolate(z, scale_factor=2.0, mode="nearest")[0, 0]
    parts = torch.split(z, [1, 3, z.shape[0] - 4])
    z = torch.cat([part.flip([0]) for part in parts]).to(torch.float32).to(torch.float64)
    total = torch.einsum("ij,ij->i", z, z).sum()
    values, index = torch.topk(p["w"], 2)
    return (
        total
        + (values * torch.gather(p["w"], 0, index)).sum()
        + F.gelu(p["w"], approximate="tanh").sum()
    )


def test_arguments_of_every_kind_survive_code_generation() -> None:
    w, x = torch.randn(3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    leaf = w.clone().requires_grad_()
    expected = odd_arguments({"w": leaf}, x)
    expected.backward()

    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(odd_arguments, mesh)
        state = step.init({"w": w}, optim.sgd(0.5))
        value, grads = step.value_and_grad(state.params, x)
        assert float(value) == float(expected.detach())
        assert torch.equal(zfunc.gather(grads)["w"], leaf.grad)

    ranks(1, run)
    ranks(2, run)


HSDP = {"replica": 2, "shard": 3}


def test_squares_of_replicated_leaves_count_once() -> None:
    """Each rank sums its own piece; what several ranks hold alike is counted on one of them."""

    def run(mesh: zfunc.Mesh) -> Tensor:
        specs = [zfunc.P(), zfunc.Flat("shard"), zfunc.Flat("replica")]
        layouts = [Layout((12,), spec, mesh) for spec in specs]
        full = torch.arange(12.0, dtype=torch.float64)
        pieces = [full[slice(*layout.range)] for layout in layouts]
        own = torch.stack([piece.square().sum() for piece in pieces])
        return sum_over_ranks(mesh, own, layouts)

    for sums in ranks(HSDP, run):
        assert sums.tolist() == [506.0, 506.0, 506.0]


def test_a_failure_alone_is_raised_as_it_is_and_drops_nothing_in_flight() -> None:
    def loss(params: Any, index: Tensor) -> Tensor:
        return F.embedding(index, params["a"]).sum()

    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss, mesh)
        state = step.init(params(), optim.sgd(0.5))
        for _ in range(2):
            with pytest.raises(IndexError):
                step(state, torch.tensor([99]))
        step(state, torch.tensor([1]))

    ranks(1, run)
