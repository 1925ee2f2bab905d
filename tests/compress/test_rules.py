"""Compressed training: values and gradients of each rule, exact counts, packed results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.harness import assert_equal, ranks
from tests.ranks import run_ranks
from zfunc import compress, optim, schedules, tree
from zfunc.compress import FakeQuantise, Heads, Magnitude, Movement, Rows

BITS = st.integers(2, 8)
SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


def normal(shape: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(SHAPES, st.integers(0, 99), BITS)
def test_a_tensor_s_levels_are_torch_s(shape: Any, seed: int, bits: int) -> None:
    x = normal(shape, seed)
    most = 2 ** (bits - 1) - 1
    scale = float(x.abs().max()) / most
    expected = torch.fake_quantize_per_tensor_affine(x, scale, 0, -most, most)
    close(FakeQuantise(bits, "tensor")(x), expected, scale)
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / (2**bits - 1)
    zero = -round(low / scale)
    expected = torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 2**bits - 1)
    close(FakeQuantise(bits, "tensor", symmetric=False)(x), expected, scale)


@given(SHAPES, st.integers(0, 99), BITS)
def test_a_channel_s_levels_are_torch_s(shape: Any, seed: int, bits: int) -> None:
    x = normal(shape, seed)
    most = 2 ** (bits - 1) - 1
    scales = x.reshape(len(x), -1).abs().amax(1) / most
    zeros = torch.zeros(len(x), dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(x, scales, zeros, 0, -most, most)
    close(FakeQuantise(bits)(x), expected, float(scales.max()))


def close(got: Tensor, expected: Tensor, scale: float) -> None:
    """Equal, but where torch, which multiplies by 1 / scale, rounds a tie to the other side."""
    off = (got - expected).abs()
    tie = off > 1e-6 * max(1.0, scale)
    assert bool((off[tie] <= scale * (1 + 1e-5)).all()) and int(tie.sum()) <= 1


@given(SHAPES, st.integers(0, 99), BITS, st.integers(1, 9), st.booleans())
def test_a_block_is_a_tensor_of_its_own(
    shape: Any, seed: int, bits: int, block: int, symmetric: bool
) -> None:
    x = normal(shape, seed)
    got = FakeQuantise(bits, block, symmetric)(x).reshape(-1)
    alone = FakeQuantise(bits, "tensor", symmetric)
    parts = [torch.cat([part, part.new_zeros(0)]) for part in x.reshape(-1).split(block)]
    assert torch.equal(got, torch.cat([alone(part) for part in parts]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_few_bits_take_few_values_and_keep_zero_and_dtype(dtype: torch.dtype) -> None:
    x = normal((64, 64), dtype=dtype)
    x[0] = 0
    for bits in (2, 4, 8):
        for symmetric in (True, False):
            y = FakeQuantise(bits, "tensor", symmetric)(x)
            assert y.dtype == dtype and len(y.unique()) <= 2**bits and not y[0].any()


def test_the_gradient_passes_straight_through() -> None:
    x = normal((3, 4)).requires_grad_()
    weights = normal((3, 4), 1)
    (grad,) = torch.autograd.grad((FakeQuantise(3)(x) * weights).sum(), x)
    assert torch.equal(grad, weights)


@given(
    SHAPES.filter(lambda shape: len(shape) > 1),
    st.integers(0, 99),
    st.floats(0, 1),
    st.booleans(),
)
def test_exactly_so_many_are_kept(shape: Any, seed: int, keep: float, traced: bool) -> None:
    x = normal(shape, seed).round()  # with ties
    part = torch.tensor(keep, dtype=torch.float64) if traced else keep
    for rule, units in ((Magnitude(), x.numel()), (Rows(), len(x)), (Rows(dim=1), x.shape[1])):
        mask = rule.mask(x, part)
        per_unit = x.numel() // units
        assert int(mask.sum()) == round(keep * units) * per_unit
        assert torch.equal(rule(x, part), torch.where(mask, x, torch.zeros(())))
    kept, dropped = x.abs()[Magnitude().mask(x, part)], x.abs()[~Magnitude().mask(x, part)]
    assert not len(kept) or not len(dropped) or kept.min() >= dropped.max()


def test_rows_and_heads_by_hand() -> None:
    x = torch.tensor([[1.0, 1], [5, -5], [2, 2], [0, 3]])
    assert Rows(0.5)(x).tolist() == [[0, 0], [5, -5], [2, 2], [0, 0]]
    assert Rows(0.5, dim=1)(x).tolist() == [[0, 1], [0, -5], [0, 2], [0, 3]]
    assert Heads(2, 0.5)(x).tolist() == [[1, 1], [5, -5], [0, 0], [0, 0]]
    with pytest.raises(ValueError, match="no 3 equal heads"):
        Heads(3, 0.5)(x)


def test_movement_trains_scores_where_weights_are_pruned_too() -> None:
    x, scores = normal((4,)).requires_grad_(), torch.tensor([3.0, 1, 2, 0]).requires_grad_()
    weights = normal((4,), 1)
    y = Movement(0.5)(x, scores=scores)
    mask = torch.tensor([1.0, 0, 1, 0])
    assert torch.equal(y, x * mask)
    grads = torch.autograd.grad((y * weights).sum(), (x, scores))
    assert torch.equal(grads[0], weights * mask)
    assert torch.equal(grads[1], weights * x.detach())


RULES: dict[str, Any] = {
    "first": (Magnitude(), FakeQuantise(4, 5)),
    "second": Movement(),
    "third": (Rows(0.5), FakeQuantise(8, symmetric=False)),
}


def params() -> dict[str, Tensor]:
    shapes = {"first": (5, 7), "second": (7, 6), "third": (6, 3), "bias": (3,)}
    return {name: normal(shape, i, torch.float64) for i, (name, shape) in enumerate(shapes.items())}


def apply_fn(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x @ p["first"]) @ p["second"]) @ p["third"] + p["bias"]


KEEP = schedules.polynomial(1.0, 0.4, 3, 3)


def batch(number: int, rank: int) -> Any:
    keep = torch.tensor(KEEP(number), dtype=torch.float64)
    return {"x": normal((4, 5), 10 * number + rank, torch.float64), "keep": keep}


def loss_fn(p: Any, b: Any) -> Tensor:
    used = compress.transform(p["params"], RULES, keep=b["keep"], scores=p["scores"])
    return apply_fn(used, b["x"]).square().mean()


def train(mesh: Any) -> tuple[list[Tensor], int, str]:
    step = zfunc.shard(loss_fn, mesh)
    start = {"params": params(), "scores": compress.scores_like(params())}
    state = step.init(start, optim.sgd(0.25))
    for number in range(4):
        state, _ = step(state, batch(number, mesh.rank))
    explained = step.explain()
    return tree.leaves(zfunc.gather(state.params)), explained.misses, explained.signatures[0].rung


def dense(world: int) -> list[Tensor]:
    """By hand: the compressed leaves are made without any rule's derivative, and put in place."""
    whole = {"params": params(), "scores": compress.scores_like(params())}
    for number in range(4):
        total = [torch.zeros_like(x) for x in tree.leaves(whole)]
        keep = KEEP(number)
        plain, scores = whole["params"], whole["scores"]
        mask = {
            "first": Magnitude().mask(plain["first"], keep).double(),
            "second": Movement().mask(scores["second"], keep).double(),
            "third": Rows().mask(plain["third"], 0.5).double(),
        }
        used = {name: x * mask.get(name, 1.0) for name, x in plain.items()}
        used["first"] = FakeQuantise(4, 5).levels(used["first"]).values(torch.float64)
        used["third"] = FakeQuantise(8, symmetric=False).levels(used["third"]).values(torch.float64)
        for rank in range(world):
            leaves = {name: x.detach().requires_grad_() for name, x in used.items()}
            loss = apply_fn(leaves, batch(number, rank)["x"]).square().mean()
            found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            moved = compress.scores_like(plain) | {"second": found["second"] * plain["second"]}
            grads = {
                "params": {name: g * mask.get(name, 1.0) for name, g in found.items()},
                "scores": moved,
            }
            total = [a + b for a, b in zip(total, tree.leaves(grads), strict=True)]
        after = [x - 0.25 * t / world for x, t in zip(tree.leaves(whole), total, strict=True)]
        whole = tree.unflatten(tree.structure(whole), after)
    return tree.leaves(whole)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sharded_training_equals_the_dense_run(world: int) -> None:
    expected = dense(world)
    for got, misses, rung in ranks(world, train):
        assert_equal(got, expected, 1e-12)
        assert (misses, rung) == (1, "traced")  # the part that is kept changes without a capture


def test_on_processes() -> None:
    for one, other in zip(run_ranks(2, train), ranks(2, train), strict=True):
        assert_equal(one[0], other[0])


@given(
    SHAPES,
    st.integers(0, 99),
    BITS,
    st.sampled_from(["tensor", "channel", 3]),
    st.booleans(),
    st.sampled_from([None, 0.0, 0.3, 1.0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_packed_results_are_the_bits_of_training(
    shape: Any, seed: int, bits: int, per: Any, symmetric: bool, keep: Any, dtype: Any
) -> None:
    tree_of = {"w": normal(shape, seed, dtype), "b": normal((3,), seed), "n": 5}
    prune = () if keep is None else (Magnitude(keep),)
    quantise = (FakeQuantise(bits, per, symmetric),)
    for rules in ({"w": prune + quantise}, {"w": prune}):
        packed = compress.pack(tree_of, rules)
        expected = compress.transform(tree_of, rules)
        again = compress.unpack(packed)
        assert again["n"] == 5 and torch.equal(again["b"], tree_of["b"])
        assert again["w"].dtype == dtype and torch.equal(again["w"], expected["w"])
        assert again["w"].shape == expected["w"].shape


def test_bytes_of_packed_results() -> None:
    tree_of, n = {"w": normal((64, 64))}, 64 * 64

    def nbytes(rule: Any, **options: Any) -> int:
        return sum(x.nbytes for x in tree.leaves(compress.pack(tree_of, {"w": rule}, **options)))

    assert nbytes(FakeQuantise(8)) == n + 64 * 4
    assert nbytes(FakeQuantise(4, 32)) == n // 2 + n // 32 * 4
    assert nbytes(FakeQuantise(3, "tensor", symmetric=False)) == n // 2 + 8
    assert nbytes(Magnitude(), keep=0.1) == round(0.1 * n) * 4 + n // 8


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: FakeQuantise(1), ValueError, "bits=1"),
        (lambda: FakeQuantise(8, "row"), ValueError, "per='row'"),  # pyright: ignore
        (lambda: FakeQuantise(8, 0), ValueError, "per=0"),
        (lambda: Magnitude()(torch.ones(2)), ValueError, "how much to keep"),
        (lambda: Magnitude(1.5)(torch.ones(2)), ValueError, "keep=1.5"),
        (lambda: compress.transform(params(), {"second": Movement(0.5)}), ValueError, "scores"),
        (lambda: compress.transform(params(), {"fourth": Magnitude(0.5)}),
         zfunc.TreeMismatchError, "'fourth' matches no leaf"),
        (lambda: compress.pack(params(), {"first": (FakeQuantise(8), Magnitude(0.5))}),
         ValueError, "first: quantisation must be the last"),
    ],
)  # fmt: skip
def test_wrong_arguments(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_rules_may_be_named_by_globs_and_leave_what_is_no_tensor() -> None:
    tree_of = {"h": [{"w": torch.ones(2, 2), "name": "x"}, {"w": torch.ones(2, 2), "name": "y"}]}
    out = compress.transform(tree_of, {"**": Magnitude(0.25)})
    assert [int(block["w"].sum()) for block in out["h"]] == [1, 1]
    assert out["h"][1]["name"] == "y" and math.isclose(float(out["h"][0]["w"][0, 0]), 1.0)
