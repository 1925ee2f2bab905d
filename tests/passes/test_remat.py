"""The remat pass: the same bits with fewer live bytes, whatever a region holds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zfunc import tree
from zfunc.capture import Argument, LeafSlot, describe, to_program, trace_forward, trace_loss
from zfunc.errors import CaptureError
from zfunc.layout import Flat, ShapeDtype, layouts_of
from zfunc.meshes import abstract_mesh
from zfunc.passes.remat import check_random, rematerialise
from zfunc.program.ir import Collective, Compute, Op, Program, Rng, map_refs, reads, writes
from zfunc.remat import remat

DERIVATIONS = ["vjp", "autograd"]
WIDTH, ROWS = 8, 6


class OldStyle(torch.autograd.Function):
    """functorch refuses it, so the capture derives by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


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


def argument(params: Any, *, trainable: bool = True) -> Argument:
    leaves, structure = tree.flatten(params)
    paths = tree.leaf_paths(params)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    layouts = layouts_of(Flat(), params, shapes, paths, abstract_mesh({"shard": 2}))
    slots = tuple(
        LeafSlot(path, ShapeDtype(tuple(leaf.shape), leaf.dtype), layout, trainable)
        for path, leaf, layout in zip(paths, leaves, layouts, strict=True)
    )
    return Argument(structure, slots)


def capture(loss: Callable[..., Any], params: Any, batch: Any, *, has_aux: bool = False) -> Program:
    described, _ = describe(batch, "batch", torch.device("cpu"))
    traced = trace_loss(loss, argument(params), described, key=False, has_aux=has_aux)
    return to_program(traced, "loss")


def run(program: Program, params: Any, batch: Any) -> list[Tensor]:
    """Interprets a program: loss, aux, gradients. Values are dropped after their last reader."""
    (micro,) = program.micros
    env: dict[int, Tensor] = dict(program.constants)
    env |= dict(zip((leaf.full for leaf in program.leaves), tree.leaves(params), strict=True))
    env |= dict(zip(micro.inputs, tree.leaves(batch), strict=True))
    outputs = [v for v in (micro.loss, *micro.aux, *micro.grads) if v is not None]
    last = {value: place for place, op in enumerate(program.ops) for value in reads(op)}
    storages = {value: tensor.untyped_storage().data_ptr() for value, tensor in env.items()}
    recorded: dict[int, Tensor] = {}
    outside: list[Tensor] = []
    for place, op in enumerate(program.ops):
        if isinstance(op, Rng):
            if op.action == "record":
                recorded[op.slot] = torch.get_rng_state()
            elif op.action == "replay":
                outside.append(torch.get_rng_state())
                torch.set_rng_state(recorded[op.slot])
            else:
                torch.set_rng_state(outside.pop())
            continue
        if isinstance(op, Collective):
            env[op.out] = env[op.source] * 2
            continue
        assert isinstance(op, Compute)
        args, kwargs = _values(op.args, env), _values(dict(op.kwargs), env)
        with torch.no_grad():
            made = op.target(*args, **kwargs)
        for out, tensor in zip(op.outs, made if op.packed else [made], strict=True):
            if out is not None:
                env[out] = tensor
                storage, owner = tensor.untyped_storage().data_ptr(), program.values[out].owner
                assert storages.setdefault(owner, storage) == storage or owner == out
                storages[owner] = storage
        for value in reads(op):
            if last[value] == place and value not in outputs:
                env.pop(value, None)
    assert not outside
    return [env[value].clone() for value in outputs]


def _values(args: Any, env: Mapping[int, Tensor]) -> Any:
    tensors: dict[int, Tensor] = {}

    def note(value: int) -> int:
        tensors[value] = env[value]
        return value

    def fill(item: Any) -> Any:
        if isinstance(item, tuple | list):
            return type(item)(fill(one) for one in item)
        if isinstance(item, dict):
            return {key: fill(one) for key, one in item.items()}
        return tensors[item.id] if hasattr(item, "id") else item

    return fill(map_refs(args, note))


def eager(loss: Callable[..., Any], params: Any, batch: Any) -> list[Tensor]:
    """Plain torch: the loss and the gradients that are not zero throughout."""
    leaves, structure = tree.flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = loss(tree.unflatten(structure, leaves), batch)
    return [out.detach(), *torch.autograd.grad(out, leaves)]


def peak_bytes(program: Program) -> int:
    """Most bytes alive at once in storages that ops made, final gradients aside."""
    values = program.values
    owners = [value.owner for value in values]
    grads = {owners[grad] for grad in program.micros[0].grads if grad is not None}
    last: dict[int, int] = {}
    for place, op in enumerate(program.ops):
        for value in (*reads(op), *writes(op)):
            last[owners[value]] = place
    born = [owners[v] for op in program.ops for v in writes(op) if owners[v] == v]
    dies = collections.defaultdict(list)
    for owner in born:
        dies[last[owner]].append(owner)
    live = peak = 0
    for place, op in enumerate(program.ops):
        live += sum(values[v].nbytes for v in writes(op) if owners[v] == v and v not in grads)
        peak = max(peak, live)
        live -= sum(values[owner].nbytes for owner in dies[place] if owner not in grads)
    return peak


def recomputed(program: Program) -> list[Compute]:
    return [op for op in program.ops if isinstance(op, Compute) and op.phase == "recompute"]


def copies(program: Program) -> collections.Counter[str]:
    """How often each value of the forward pass is made again."""
    names = (program.values[out].name for op in recomputed(program) for out in writes(op))
    return collections.Counter(name.rstrip("'") for name in names)


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def check(loss: Callable[..., Any], params: Any, batch: Any) -> Program:
    """Runs a loss before and after the pass and in plain torch: the same bits everywhere."""
    before = capture(loss, params, batch)
    after = rematerialise(before)
    results, states = [], []
    for function in (
        lambda: run(before, params, batch),
        lambda: run(after, params, batch),
        lambda: eager(loss, params, batch),
    ):
        torch.manual_seed(11)
        results.append(function())
        states.append(torch.get_rng_state())
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])
    assert torch.equal(states[0], states[1])
    check_bookkeeping(before, after)
    return after


def check_bookkeeping(before: Program, after: Program) -> None:
    """Values are made before they are read, once; copies keep shape, bytes and owner."""
    made = {leaf.full for leaf in after.leaves} | set(after.micros[0].inputs) | set(after.constants)
    for op in after.ops:
        assert made.issuperset(reads(op))
        assert made.isdisjoint(writes(op))
        made.update(writes(op))
        assert all(after.values[out].owner in made for out in writes(op))
    by_name = {value.name: value for value in before.values}
    for value in after.values[len(before.values) :]:
        old = by_name[value.name.rstrip("'")]
        assert (value.spec, value.nbytes, value.role) == (old.spec, old.nbytes, old.role)
        old_owner = before.values[old.owner].name
        assert after.values[value.owner].name.rstrip("'") == old_owner
    depths = {
        before.values[out].name: len(op.regions)
        for op in before.ops
        if isinstance(op, Compute)
        for out in writes(op)
    }
    assert all(count <= depths[name] for name, count in copies(after).items())


def weights(num: int, names: str = "o", width: int = WIDTH) -> list[dict[str, Tensor]]:
    """Parameters of blocks, the leaves that `names` names; the gradient of each is dense."""
    torch.manual_seed(3)
    shapes = {
        "d": (4 * width, width),
        "o": (width, width),
        "q": (width, 3 * width),
        "u": (width, 4 * width),
    }
    return [{name: torch.randn(shapes[name]) * 0.2 for name in names} for _ in range(num)]


def inputs(rows: int = ROWS, width: int = WIDTH) -> dict[str, Tensor]:
    torch.manual_seed(4)
    return {"x": torch.randn(2, rows, width)}


def attention(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    rows, width = h.shape[1:]
    q, k, v = (h @ p["q"]).chunk(3, -1)
    q, k, v = (t.view(2, rows, 2, width // 2).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return h + mixed.transpose(1, 2).reshape(2, rows, width) @ p["o"]


def transformer(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    h = attention(h, p)
    return h + F.gelu(h @ p["u"]) @ p["d"]


def dropout(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    return h + F.dropout(torch.tanh(h @ p["u"]), 0.25) @ p["d"]


def in_place(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    z = h @ p["u"]
    z.add_(1.0)
    return (F.relu_(z) @ p["d"]).add_(h)


def views(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    a, b, c = torch.sin(h @ p["q"]).chunk(3, -1)
    return torch.cat([a[:, ::2] * b[:, 1::2], c[:, 1::2].cos()], 1) @ p["o"]


def final_tanh(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    return torch.tanh(torch.tanh(h @ p["o"]) @ p["o"])


BLOCKS = {transformer: "doqu", dropout: "du", in_place: "du", views: "oq", final_tanh: "o"}


def finish(h: Tensor, derivation: str) -> Tensor:
    if derivation == "autograd":
        h = OldStyle.apply(h)  # pyright: ignore
    return h.pow(2).mean()


def nested(block: Callable[..., Tensor], sizes: tuple[int, ...]) -> Callable[..., Tensor]:
    """Applies a block per parameters; `sizes` are the lengths of regions, outermost first."""
    if not sizes:

        def plain(h: Tensor, ps: list[Any]) -> Tensor:
            for p in ps:
                h = block(h, p)
            return h

        return plain
    inner = nested(block, sizes[1:])

    def split(h: Tensor, ps: list[Any]) -> Tensor:
        for start in range(0, len(ps), sizes[0]):
            part = ps[start : start + sizes[0]]
            h = remat(lambda h, part=part: inner(h, part))(h)
        return h

    return split


def loss_of(
    block: Callable[..., Tensor], sizes: tuple[int, ...], derivation: str
) -> Callable[..., Tensor]:
    body = nested(block, sizes)

    def loss(params: list[Any], batch: Any) -> Tensor:
        return finish(body(batch["x"], params), derivation)

    return loss


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
    program = capture(checkpointed(dropout), weights(2, "du"), inputs())
    with pytest.raises(CaptureError, match=r"(?s)backward pass of loss draws .*zfunc\.remat"):
        rematerialise(program)


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
