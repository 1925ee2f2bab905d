"""Memory of programs: figures by hand, the checker's walk, and storages of real runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.checker import live_bytes
from tests.programs import capture, draft_step, interpret
from zfunc.comm.pieces import pieces
from zfunc.errors import BudgetError
from zfunc.layout import ShapeDtype, zero
from zfunc.passes import build
from zfunc.program.ir import Program
from zfunc.program.memory import memory_analysis, staging_bytes

LIVE = (92, 92, 92, 92, 92, 80, 80, 60, 120, 152, 152, 160, 160, 124, 124, 80, 0, 0)
ACTIVATIONS = (0, 0, 0, 40, 40, 80, 40, 44, *[4] * 10)


def test_the_step_drafted_by_hand_has_the_bytes_of_its_docstring() -> None:
    memory = memory_analysis(draft_step(), {"shard": 2}, opt_bytes=7, unsharded_opt_bytes=14)
    assert memory.live_bytes == LIVE
    assert memory.activation_bytes == ACTIVATIONS
    assert (memory.peak_live_bytes, memory.peak_live_op) == (160, 11)
    assert memory.peak_live_text.startswith("compute    v10:float32[5] = aten.mul.Tensor(v5, v8)")
    assert memory.peak_activation_bytes == 80
    assert (memory.params_bytes, memory.grads_bytes, memory.opt_bytes) == (44, 44, 7)
    unsharded = memory.unsharded_params_bytes, memory.unsharded_grads_bytes
    assert unsharded == (80, 80) and memory.unsharded_opt_bytes == 14
    # Op 13: 124 live, 4 of the loss, 44 of reduced gradients; beside 44 + 7 of state, 24 of input.
    assert memory.peak_total_bytes == 124 + 4 + 44 + 44 + 7 + 24


def test_it_prints_as_a_table() -> None:
    text = str(memory_analysis(draft_step(), {"shard": 2}, opt_bytes=88_000, unsharded_opt_bytes=1))
    assert text.splitlines()[0].split() == ["bytes", "of", "one", "rank", "sharded", "unsharded"]
    rows = {" ".join(line.split()) for line in text.splitlines()}
    assert {"optimizer state 88.0kB 1B", "activations, peak 80B"} <= rows
    assert (
        "live, peak 160B at op 11: compute v10:float32[5] = aten.mul.Tensor(v5, v8) back..." in rows
    )


@given(st.integers(0, 300_000), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_staging_is_what_the_busiest_rank_receives(
    numel: int, ranks: int, dtype: torch.dtype
) -> None:
    sizes = [p.numel() * dtype.itemsize for p in pieces(torch.empty(numel, device="meta"), ranks)]
    received = max(sum(sizes) - own for own in sizes)
    expected = 0 if sizes[0] >= 256 * 1024 else received
    assert staging_bytes(ShapeDtype((numel,), dtype), ranks) == expected


@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 3}, {"replica": 2, "shard": 2}])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_live_bytes_are_those_of_the_checker(axes: dict[str, int], stage: int) -> None:
    captured, mesh = capture(axes=axes, specs=zero(stage))
    smallest = _smallest(captured, mesh)
    for budget in (None, smallest + 100, smallest):
        program = build([captured], mesh, update=True, live_bytes=budget)
        memory = memory_analysis(program, axes)
        assert list(memory.live_bytes) == live_bytes(program)
        assert budget is None or memory.peak_live_bytes <= budget


def _smallest(captured: Program, mesh: object) -> int:
    try:
        build([captured], mesh, update=True, live_bytes=0)  # pyright: ignore
    except BudgetError as error:
        return error.needed_bytes
    return 0


def _attention_loss(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    """Views, in-place ops, several outputs, an alias of an input."""
    x = batch.view(2, 6, 8)
    q, k, v = (x @ params["qkv"]).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 6, 8)
    h = F.rms_norm(x + h, (8,), params["norm"])
    return F.gelu(h @ params["up"]).square_().mean()


def test_activations_are_those_of_a_real_run() -> None:
    params = {"norm": torch.ones(8), "qkv": torch.randn(8, 24), "up": torch.randn(8, 16)}
    batch = torch.randn(12, 8)
    program, _ = capture(_attention_loss, params, batch, axes={"shard": 1})
    given = dict(zip([leaf.full for leaf in program.leaves], params.values(), strict=True))
    given[program.micros[0].inputs[0]] = batch
    given |= program.constants
    run = interpret(program, given, ["activation"])
    assert list(memory_analysis(program, {"shard": 1}).activation_bytes) == run.held_bytes
    assert max(run.held_bytes) > min(run.held_bytes)


def test_a_rank_counts_its_own_pieces_but_plans_like_the_others() -> None:
    found = []
    for rank in range(4):
        captured, mesh = capture(axes={"shard": 4}, rank=rank)
        program = build([captured], mesh, update=True)
        found.append(memory_analysis(program, {"shard": 4}))
    assert len({memory.live_bytes for memory in found}) == 1
    assert len({memory.params_bytes for memory in found}) > 1
    whole = {memory.unsharded_params_bytes for memory in found}
    assert whole == {sum(memory.params_bytes for memory in found)}


def test_an_empty_program_has_no_peak() -> None:
    program = dataclasses.replace(draft_step(), ops=(), micros=())
    memory = memory_analysis(program, {"shard": 2})
    assert (memory.peak_live_bytes, memory.peak_live_op, memory.peak_live_text) == (0, -1, "")
    assert "live, peak" in str(memory)
