"""Cost against torch's FLOP counter, messages that virtual ranks count, and hand-made timelines."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.bench.packing import MODES, Trace, draw_trace
from tests.bench.packing import least_gathered_bytes as optimum
from tests.programs import Draft, aten, capture, draft_step
from zfunc.comm import local_mesh
from zfunc.meshes import Hardware, Mesh
from zfunc.passes import build
from zfunc.program.bound import least_gathered_bytes
from zfunc.program.cost import cost_analysis, op_flops, op_seconds, traffic
from zfunc.program.ir import Compute, Free, Gather, Micro, Program, Reduce, Wait

# One byte a second on memory and network, one FLOP a second, messages of 1000 s.
SLOW = Hardware(1.0, 1.0, 1.0, 1000.0, 1)


def _eager_flops(loss: Callable[..., Tensor], params: dict[str, Tensor], batch: Tensor) -> int:
    """What torch counts for a loss and its gradient; attention as plain products."""
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in params.items()}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss(leaves, batch).backward()
    return counter.get_total_flops()


def _flops(loss: Callable[..., Tensor], params: dict[str, Tensor], batch: Tensor) -> int:
    program, _ = capture(loss, params, batch, axes={"shard": 1})
    return sum(op_flops(op, program) for op in program.ops if isinstance(op, Compute))


def _products(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    h = F.linear(batch, params["w"], params["b"])
    return torch.einsum("bi,bij->bj", h, params["cube"]).square().mean()


def _additive(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    h = torch.baddbmm(params["cube"], batch[:, None, :].expand(4, 2, 3), params["batched"])
    return torch.addmm(params["bias"], h.flatten(0, 1), params["last"]).mean()


def _convolutions(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    image = batch.view(1, 2, 1, 6)[..., :3, :]
    h = F.conv2d(image, params["w"], params["b"], stride=(1, 2), padding=1)
    return F.conv_transpose2d(h, params["t"]).square().mean()


LOSSES: list[tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = [
    (_products, {"b": (5,), "cube": (4, 5, 2), "w": (5, 3)}),
    (
        _additive,
        {"batched": (4, 3, 5), "bias": (6,), "cube": (4, 2, 5), "last": (5, 6)},
    ),
    (_convolutions, {"b": (3,), "t": (3, 2, 2, 3), "w": (3, 2, 2, 3)}),
]


@pytest.mark.parametrize("loss, shapes", LOSSES, ids=lambda x: getattr(x, "__name__", ""))
def test_flops_are_those_that_torch_counts(
    loss: Callable[..., Tensor], shapes: dict[str, tuple[int, ...]]
) -> None:
    params = {name: torch.randn(shape) for name, shape in shapes.items()}
    batch = torch.randn(4, 3)
    assert _flops(loss, params, batch) == _eager_flops(loss, params, batch) > 0


def _attention(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    q, k, v = params["q"], params["k"], params["v"]
    return F.scaled_dot_product_attention(q * batch, k, v).square().mean()


def test_a_grouped_convolution_applies_each_weight_to_its_group_only() -> None:
    weight, batch = {"w": torch.randn(4, 3, 2, 2)}, torch.randn(5, 6, 3, 3)
    products = 5 * (2 * 2) * 4 * 3 * (2 * 2)
    total = _flops(lambda p, b: F.conv2d(b, p["w"], groups=2).mean(), weight, batch)
    assert total == 2 * products + 2 * products  # forward, and the gradient of the weight


def test_attention_is_its_plain_products_and_the_scores_again_in_backward() -> None:
    params = {"k": torch.randn(2, 3, 7, 4), "q": torch.randn(2, 3, 5, 4)}
    params["v"] = torch.randn(2, 3, 7, 4)
    scores = 2 * (2 * 3) * 5 * 7 * 4
    batch = torch.ones(())
    assert _flops(_attention, params, batch) == _eager_flops(_attention, params, batch) + scores


SIZES = [(64, 64, 32), (1 << 18, 1 << 18), (1 << 18, 64, 1 << 17), (12,)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["gather", "reduce", "reduce whole"])
def test_traffic_is_what_virtual_ranks_count(kind: str, sizes: tuple[int, ...], ranks: int) -> None:
    def communicate(mesh: Mesh) -> tuple[int, int]:
        comm: Any = mesh.comm
        fulls = [torch.zeros(numel) for numel in sizes]
        own = [torch.zeros(numel // ranks) for numel in sizes]
        if kind == "gather":
            comm.gather("shard", own, fulls).wait()
        elif kind == "reduce":
            comm.reduce("shard", fulls, own).wait()
        else:
            comm.all_reduce("shard", fulls, [torch.zeros_like(full) for full in fulls]).wait()
        stats = comm.stats()
        return stats.payload_bytes, stats.messages

    d = Draft({"shard": ranks})
    leaves = tuple(d.leaf(f"params[{i}]", (numel,)) for i, numel in enumerate(sizes))
    fulls = tuple(d.value((numel,), "copy") for numel in sizes)
    outs = tuple(d.value((numel // ranks,), "shard") for numel in sizes)
    op = Gather("shard", leaves, fulls, 0)
    if kind != "gather":
        op = Reduce("shard", leaves, fulls, outs, kind == "reduce", 0, 0)
    d.ops.append(op)
    program = d.program(Micro((), None, None, None, (), ()), mode="forward")
    counted = local_mesh(ranks).run(communicate)
    assert set(counted) == {traffic(op, program, {"shard": ranks})}


def test_an_axis_of_one_rank_costs_nothing() -> None:
    program = draft_step()
    cost = cost_analysis(program, Hardware(), {"shard": 1})
    assert (cost.network_bytes, cost.num_messages, cost.communication_s) == (0, 0, 0.0)


def test_the_hand_drafted_step_in_time() -> None:
    """Gathers take 1032, 1012, 1012, the reduce 1044, the status 1040 s; compute in between."""
    program = draft_step()
    seconds = [op_seconds(op, program, SLOW, {"shard": 2}) for op in program.ops]
    mm, add, total, grad_w, grad_b = 124.0, 100.0, 44.0, 124.0, 44.0
    update = 8 * 4 * (8 + 3)
    assert seconds == [
        *(1032, 0, 1012, mm, 0, add, 0, total, grad_w),
        *(1012, 0, grad_b, 0, 1044, 0, 0, 1040, update),
    ]
    cost = cost_analysis(program, SLOW, {"shard": 2})
    compute = mm + add + total + grad_w + grad_b + update
    network = 1032 + 1012 + 1012 + 1044 + 1040
    assert cost.flops == 2 * 2 * 3 * 5
    assert (cost.compute_s, cost.communication_s) == (compute, network)
    # Only the second gather overlaps compute: the matrix product.
    assert cost.exposed_communication_s == network - mm
    assert cost.step_s == compute + network - mm
    assert cost.bound_s == network
    assert (cost.gathered_bytes, cost.reduced_bytes) == (60 + 20 + 20, 80)
    assert (cost.network_bytes, cost.num_messages) == (32 + 12 + 12 + 44 + 40, 5)
    assert "gathered       100B, 1.250 x the least possible" in str(cost)


def test_arithmetic_bounds_a_product_when_memory_is_fast() -> None:
    program = draft_step()
    fast_memory = dataclasses.replace(SLOW, memory_bytes_per_s=1e9)
    assert op_seconds(program.ops[3], program, fast_memory, {"shard": 2}) == 60.0


def test_views_cost_nothing_and_lookups_only_their_rows() -> None:
    d = Draft()
    table, rows = d.value((1000, 4), "input"), d.value((3,), "input", dtype=torch.int64)
    d.compute(aten.t.default, table, out=d.value((4, 1000), "input", of=table))
    d.compute(aten.embedding.default, table, rows, out=d.value((3, 4)))
    d.compute(aten.neg_.default, table, out=d.value((1000, 4), "input", of=table))
    program = d.program(Micro((), None, None, None, (), ()), mode="forward")
    seconds = [op_seconds(op, program, SLOW, {"shard": 2}) for op in program.ops]
    assert seconds == [0.0, 2 * 48, 2 * 16000]


def _accessing(trace: Trace) -> Program:
    """Reads the items of a trace one after the other, gathering each anew."""
    d = Draft()
    leaves = [d.leaf(f"params[{i}]", (size,)) for i, size in enumerate(trace.sizes)]
    for token, item in enumerate(trace.accesses):
        copy = d.copy(leaves[item])
        d.ops += [Gather("shard", (leaves[item],), (copy,), token), Wait(token)]
        d.compute(aten.neg.default, copy, out=d.value((trace.sizes[item],)))
        d.ops.append(Free((copy,)))
    micro = Micro((), None, None, None, (), ())
    return d.program(micro, mode="forward", limit=4 * trace.budget)


@pytest.mark.parametrize("mode", MODES)
def test_the_bound_is_below_the_optimum(mode: str) -> None:
    rnd = random.Random(0)
    tight = 0
    for _ in range(100):
        trace = draw_trace(rnd, mode, accesses=10)
        best = 4 * optimum(trace)
        bound = least_gathered_bytes(_accessing(trace))
        assert bound <= best
        tight += bound == best
    assert tight > 10


def test_the_bound_is_the_optimum_for_forward_and_backward() -> None:
    accesses = (*range(20), *reversed(range(20))) * 2
    trace = Trace(accesses, (5,) * 20, 35)
    # Seven copies fit, so thirteen of twenty are gathered again at each of three turns.
    assert least_gathered_bytes(_accessing(trace)) == 4 * 5 * (20 + 3 * 13)


def test_without_a_budget_each_leaf_counts_once() -> None:
    assert least_gathered_bytes(draft_step()) == 80
    # At the gradient of w, it and the copy of w take 120 bytes; b between its two reads has 20.
    assert least_gathered_bytes(draft_step(limit=140)) == 80
    assert least_gathered_bytes(draft_step(limit=130)) == 80 + 10


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replica": 2, "shard": 3}])
def test_programs_of_the_passes_gather_no_less_than_the_bound(axes: dict[str, int]) -> None:
    captured, mesh = capture(axes=axes)
    program = build([captured] * 2, mesh, update=True)
    cost = cost_analysis(program, mesh.hw, axes)
    assert cost.gathered_bytes == cost.least_gathered_bytes
    assert cost.bound_s <= cost.step_s <= cost.compute_s + cost.communication_s
    assert cost.exposed_communication_s == pytest.approx(cost.step_s - cost.compute_s)
