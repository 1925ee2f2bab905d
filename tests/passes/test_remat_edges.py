"""The remat pass where storages are overwritten, numbers are drawn or ranks communicate."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.passes.blocks import (
    DERIVATIONS,
    attention,
    dropout,
    final_tanh,
    finish,
    inputs,
    loss_of,
    nested,
    transformer,
    weights,
)
from tests.passes.interpreter import argument, capture, check, copies, equal, recomputed, run
from zfunc.capture import describe, to_program, trace_forward
from zfunc.errors import CaptureError
from zfunc.passes.remat import check_random, rematerialise
from zfunc.program.ir import Collective, Compute, Op, Rng, reads, writes
from zfunc.rematerialise import remat


class Scribble(torch.autograd.Function):
    """Its backward writes into what its forward saved."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return saved.mul_(2).mul_(grad)


class RandomBackward(torch.autograd.Function):
    """A gradient that is rounded at random."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + torch.rand_like(grad)


@pytest.mark.parametrize("derivation", DERIVATIONS)
@pytest.mark.parametrize("case", ["input", "early", "slice", "outside", "inside_input", "backward"])
def test_overwritten_storages(case: str, derivation: str) -> None:
    def overwritten_input(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        y = remat(lambda h: torch.sin(h * 2))(h)
        return y + h.mul_(3)

    def early_version(x: Tensor, w: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            a = x @ w
            b = torch.sin(a * 2)
            return b * torch.cos(a.add_(1))

        return remat(block)(x)

    def written_slice(x: Tensor, w: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            a = x @ w
            a[:, 0] = 0.5
            a[:, 1:3].mul_(2)
            return torch.sin(a) * a.exp()

        return remat(block)(x)

    def written_outside(x: Tensor, w: Tensor) -> Tensor:
        def block(x: Tensor) -> tuple[Tensor, Tensor]:
            a = x @ w
            return a, torch.sin(a * 2).exp()

        a, b = remat(block)(x)
        return a.mul_(2) + b

    def written_input(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w

        def block(h: Tensor) -> Tensor:
            return torch.sin(h * 2) + h.mul_(2).exp()

        return remat(block)(h)

    def written_backward(x: Tensor, w: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            a = x @ w
            return Scribble.apply(a) + (a * 2).sin()  # pyright: ignore

        return remat(block)(x)

    body = {
        "input": overwritten_input,
        "early": early_version,
        "slice": written_slice,
        "outside": written_outside,
        "inside_input": written_input,
        "backward": written_backward,
    }[case]

    def loss(params: list[Any], batch: Any) -> Tensor:
        h = body(batch["x"], params[0]["o"])
        return finish(body(h, params[0]["o"]), derivation)

    check(loss, weights(1), inputs())


def test_random_numbers_are_recorded_once_and_replayed() -> None:
    after = check(loss_of(dropout, (2, 1), "vjp"), weights(4, "du"), inputs())
    rng = [op for op in after.ops if isinstance(op, Rng)]
    slots = collections.Counter(op.slot for op in rng if op.action == "record")
    assert slots == {slot: 1 for slot in range(4)}
    for place, op in enumerate(after.ops):
        if isinstance(op, Rng) and op.action == "replay":
            draw, restore = after.ops[place + 1 : place + 3]
            assert isinstance(draw, Compute) and draw.phase == "recompute"
            assert restore == Rng("restore", op.slot)


def test_numbers_after_a_region_are_those_without_it() -> None:
    # The first mask is needed by nobody in the forward pass, yet its draw must stay.
    class Mask(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, mask: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[1])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (mask,) = ctx.saved_tensors
            return grad * mask, None

    def block(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        return Mask.apply(h @ p["o"], torch.rand_like(h)) + 1  # pyright: ignore

    def loss(params: list[Any], batch: Any) -> Tensor:
        h = nested(block, (1,))(batch["x"], params)
        return F.dropout(h, 0.5).pow(2).mean()

    after = check(loss, weights(2), inputs())
    draws = [str(op.target) for op in recomputed(after)]
    assert draws.count("aten.rand_like.default") == 2


def test_what_only_the_backward_pass_needs_leaves_the_forward_pass() -> None:
    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[0].cos())

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (saved,) = ctx.saved_tensors
            return grad * saved

    def block(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        return Saved.apply(h @ p["o"])  # pyright: ignore

    after = check(loss_of(block, (1,), "vjp"), weights(2), inputs())
    cosines = [op.phase for op in after.ops if isinstance(op, Compute) and "cos" in str(op.target)]
    assert cosines == ["recompute", "recompute"]


def test_attention_without_dropout_needs_no_generator() -> None:
    after = check(loss_of(attention, (1,), "vjp"), weights(2, "oq"), inputs())
    assert any("flash" in str(op.target) for op in recomputed(after))
    assert not any(isinstance(op, Rng) for op in after.ops)


@pytest.mark.parametrize("sizes", [(1,), (2, 1)])
def test_a_collective_is_kept(sizes: tuple[int, ...]) -> None:
    def block(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        return torch.sin(torch.tanh(h @ p["o"]) * 2).exp() @ p["o"]

    def with_collectives(op: Op) -> Op:
        if not (isinstance(op, Compute) and op.phase == "forward"):
            return op
        if op.target is not torch.ops.aten.mul.Tensor:
            return op
        (out,) = writes(op)
        return Collective("sum", "shard", reads(op)[0], out, ())

    params, batch = weights(4), inputs()
    before = capture(loss_of(block, sizes, "vjp"), params, batch)
    before = dataclasses.replace(before, ops=tuple(map(with_collectives, before.ops)))
    after = rematerialise(before)
    assert equal(run(before, params, batch), run(after, params, batch))
    for program in (before, after):
        assert sum(isinstance(op, Collective) for op in program.ops) == 4
    assert copies(after)["sin"] and copies(after)["tanh"] == 0


def test_a_collective_that_nobody_reads_stays() -> None:
    before = capture(loss_of(final_tanh, (1,), "vjp"), weights(2), inputs())
    source = next(writes(op)[0] for op in before.ops if "tanh" in str(getattr(op, "target", "")))
    unread = dataclasses.replace(before.values[source], name="sum", owner=len(before.values))
    extra = Collective("sum", "shard", source, len(before.values), ())
    place = next(k for k, op in enumerate(before.ops) if getattr(op, "phase", "") == "backward")
    ops = (*before.ops[:place], extra, *before.ops[place:])
    after = rematerialise(dataclasses.replace(before, ops=ops, values=(*before.values, unread)))
    assert [op for op in after.ops if isinstance(op, Collective)] == [extra]


@pytest.mark.parametrize("derivation", DERIVATIONS)
def test_without_regions_nothing_changes(derivation: str) -> None:
    program = capture(loss_of(transformer, (), derivation), weights(2, "doqu"), inputs())
    assert rematerialise(program) is program


def test_without_a_derivative_nothing_changes() -> None:
    params, batch = weights(2, "du"), inputs()
    described, _ = describe((batch,), "batch", torch.device("cpu"))
    forward = trace_forward(
        loss_of(dropout, (1,), "vjp"), argument(params, trainable=False), described
    )
    program = to_program(forward, "forward")
    assert rematerialise(program) is program


def checkpointed(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(params: list[Any], batch: Any) -> Tensor:
        h = batch["x"]
        for p in params:
            h = checkpoint(block, h, p, use_reentrant=False)
        return h.pow(2).mean()

    return loss


def test_random_ops_under_torch_checkpoint_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)bernoulli.*blocks\.py.*zfunc\.remat"):
        capture(checkpointed(dropout), weights(2, "du"), inputs())


def test_a_random_backward_is_refused() -> None:
    def loss(params: list[Any], batch: Any) -> Tensor:
        return RandomBackward.apply(batch["x"] @ params[0]["o"]).sum()  # pyright: ignore

    program = capture(loss, weights(1), inputs())
    with pytest.raises(CaptureError, match="rand_like"):
        check_random(program)


@pytest.mark.parametrize("sizes", [(), (1,)])
def test_torch_checkpoint_of_other_ops_is_the_users_choice(sizes: tuple[int, ...]) -> None:
    inner = checkpointed(transformer)

    def loss(params: list[Any], batch: Any) -> Tensor:
        h = nested(transformer, sizes)(batch["x"], params)
        return inner(params, {"x": h})

    check(loss, weights(2, "doqu"), inputs())
