"""The remat pass: the same bits with fewer live bytes, whatever a region holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.passes.blocks import (
    BLOCKS,
    DERIVATIONS,
    ROWS,
    dropout,
    final_tanh,
    finish,
    inputs,
    loss_of,
    transformer,
    weights,
)
from tests.passes.interpreter import capture, check, copies, equal, peak_bytes, recomputed, run
from zfunc.passes.remat import rematerialise
from zfunc.program.ir import Compute, reads, writes
from zfunc.rematerialise import remat


@pytest.mark.parametrize("derivation", DERIVATIONS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("num", "sizes"), [(2, (1,)), (4, (4, 2, 1))])
def test_same_bits(block: Any, num: int, sizes: tuple[int, ...], derivation: str) -> None:
    # Every block reads its parameters from a closure.
    after = check(loss_of(block, sizes, derivation), weights(num, BLOCKS[block]), inputs())
    assert recomputed(after)


@pytest.mark.parametrize("derivation", DERIVATIONS)
@pytest.mark.parametrize("sizes", [(), (1,), (2, 1)])
def test_whole_loss(sizes: tuple[int, ...], derivation: str) -> None:
    after = check(remat(loss_of(dropout, sizes, derivation)), weights(4, "du"), inputs())
    made = {out: op.phase for op in after.ops if isinstance(op, Compute) for out in writes(op)}
    saved = {
        after.values[value].owner
        for op in after.ops
        if isinstance(op, Compute) and op.phase != "forward"
        for value in reads(op)
        if made.get(value) == "forward"
    }
    assert {owner for owner in saved if after.values[owner].role == "activation"} == {
        after.micros[0].loss
    }


@pytest.mark.parametrize("derivation", DERIVATIONS)
def test_trees_and_keywords(derivation: str) -> None:
    @remat
    def block(tensors: dict[str, Tensor], *, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        y = tensors["x"] @ tensors["w"]
        return {"y": torch.tanh(y)[:, rows], "z": y.sigmoid()}, y.sin().sum()

    def loss(params: list[Any], batch: Any) -> Tensor:
        x, total = batch["x"], 0.0
        for p in params:
            outs, term = block({"w": p["o"], "x": x}, rows=torch.arange(ROWS).flip(0))
            x, total = outs["y"] * outs["z"], total + term
        return finish(x, derivation) + total

    check(loss, weights(3), inputs())


def test_auxiliary_outputs_are_kept() -> None:
    def loss(params: list[Any], batch: Any) -> Any:
        @remat
        def block(h: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(h @ params[0]["o"])
            return (hidden.exp() @ params[0]["o"]).sum(), hidden

        return block(batch["x"])

    params, batch = weights(1), inputs()
    before = capture(loss, params, batch, has_aux=True)
    after = rematerialise(before)
    assert equal(run(before, params, batch), run(after, params, batch))
    assert copies(after)["exp"] == 1
    assert copies(after)["tanh"] == 0


def test_values_read_outside_are_not_recomputed() -> None:
    before = capture(loss_of(transformer, (1,), "vjp"), weights(4, "doqu"), inputs())
    after = rematerialise(before)
    home = {
        out: op.regions
        for op in before.ops
        if isinstance(op, Compute) and op.phase == "forward"
        for out in writes(op)
    }
    outputs = {
        before.values[value].name
        for op in before.ops
        if isinstance(op, Compute) and op.phase == "forward"
        for value in reads(op)
        if home.get(value, ()) not in ((), op.regions)
    }
    assert len(outputs) == 4
    assert not outputs & copies(after).keys()


def test_only_what_is_needed_is_recomputed() -> None:
    def loss(params: list[Any], batch: Any) -> Tensor:
        h = remat(lambda x: torch.sin(x @ params[0]["o"]).exp() + 1)(batch["x"])
        return (h @ params[0]["o"]).sum()

    after = check(loss, weights(1), inputs())
    names = [str(op.target) for op in recomputed(after)]
    assert names == [
        "aten.mm.default",
        "aten._unsafe_view.default",
        "aten.sin.default",
        "aten.exp.default",
    ]


def test_recomputation_is_late() -> None:
    after = rematerialise(capture(loss_of(transformer, (1,), "vjp"), weights(3, "doqu"), inputs()))
    phases = [op.phase for op in after.ops if isinstance(op, Compute)]
    runs = [
        phase for phase, previous in zip(phases, ["", *phases], strict=False) if phase != previous
    ]
    # forward, then for each block recompute followed by backward, at the least.
    assert runs.count("recompute") >= 3
    regions = [
        op.regions for op in after.ops if isinstance(op, Compute) and op.phase == "recompute"
    ]
    assert list(dict.fromkeys(regions)) == [("3",), ("2",), ("1",)]


@pytest.mark.parametrize("derivation", DERIVATIONS)
def test_nesting_lowers_the_peak(derivation: str) -> None:
    params, batch = weights(8, "doqu"), inputs(rows=64)
    peaks = [
        peak_bytes(rematerialise(capture(loss_of(transformer, sizes, derivation), params, batch)))
        for sizes in ((), (1,), (4, 1))
    ]
    assert peaks[0] > peaks[1] > peaks[2]


def test_three_levels_beat_two() -> None:
    params, batch = weights(27), inputs(rows=64)
    peaks = [
        peak_bytes(rematerialise(capture(loss_of(final_tanh, sizes, "vjp"), params, batch)))
        for sizes in ((), (1,), (5, 1), (9, 3, 1))
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


FRAGMENTS: dict[str, Callable[..., Tensor]] = {
    "tanh": lambda h, w: torch.tanh(h @ w),
    "dropout": lambda h, w: F.dropout(h, 0.5) * h.sin(),
    "relu_": lambda h, w: F.relu_(h @ w) + h,
    "add_": lambda h, w: (h * 2).add_(h.cos()).mul_(0.5),
    "chunk": lambda h, w: torch.cat(h.exp().sigmoid().chunk(2, -1)[::-1], -1),
    "setitem": lambda h, w: h.clone().index_fill_(1, torch.tensor([1]), 0.5).sin(),
    "softmax": lambda h, w: torch.softmax(h, -1) @ w,
}

plans = st.recursive(
    st.sampled_from(sorted(FRAGMENTS)),
    lambda inner: st.lists(inner, min_size=1, max_size=3),
    max_leaves=8,
)


@settings(max_examples=20, deadline=None)
@given(plan=st.lists(plans, min_size=1, max_size=3), derivation=st.sampled_from(DERIVATIONS))
def test_random_nesting(plan: list[Any], derivation: str) -> None:
    """A string is a fragment, a list a region."""

    def loss(params: dict[str, Tensor], batch: Any) -> Tensor:
        def apply(part: Any, h: Tensor) -> Tensor:
            if isinstance(part, str):
                return FRAGMENTS[part](h, params["w"])

            def region(h: Tensor) -> Tensor:
                for one in part:
                    h = apply(one, h)
                return h

            return remat(region)(h)

        h = batch["x"] @ params["w"]
        for part in plan:
            h = apply(part, h)
        return finish(h, derivation)

    check(loss, {"w": weights(1)[0]["o"]}, inputs())
