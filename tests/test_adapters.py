"""LoRA on a frozen base, whole or in eight bits: values, gradients, bytes."""

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
from tests.oracle import Adamw, Oracle
from tests.ranks import run_ranks
from zfunc import optim, random, tree
from zfunc.quantised import Quantised, dequantise, quantise

KEY = random.key(3)
RANKS = {"blocks/*/w": 2, "head": 1}


def params(dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    blocks = [{"w": draw(5, 5), "b": draw(5)} for _ in range(2)]
    return {"blocks": blocks, "head": draw(5, 3), "count": torch.arange(2), "none": None}


def apply_fn(p: Any, x: Tensor) -> Tensor:
    for block in p["blocks"]:
        x = torch.tanh(x @ block["w"] + block["b"])
    return x @ p["head"]


def batches(step: int, world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    return list(torch.randn(world, 4, 5, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("base", [None, "int8"])
def test_training_starts_from_the_base(base: Any) -> None:
    adapted, tree_of = zfunc.lora(apply_fn, params(), RANKS, key=KEY, base=base)
    x = batches(0, 1)[0]
    own = tree.map(dequantise, tree_of["base"], is_leaf=lambda n: isinstance(n, Quantised))
    assert torch.equal(adapted(tree_of, x), apply_fn(own, x))
    kept = {type(leaf) for leaf in (tree_of["base"]["blocks"][0]["w"], tree_of["base"]["head"])}
    assert kept == {Quantised if base else Tensor}
    assert type(tree_of["base"]["blocks"][0]["b"]) is Tensor
    assert sorted(tree_of["factors"]) == ["blocks/0/w", "blocks/1/w", "head"]
    drawn = [pair["b"] for pair in tree_of["factors"].values()]
    assert not torch.equal(drawn[0], drawn[1])
    many = zfunc.lora(apply_fn, {"w": torch.ones(4, 10_000)}, {"**": 4}, key=KEY)[1]
    assert float(many["factors"]["w"]["b"].var() * 10_000) == pytest.approx(1, rel=0.05)


def train(mesh: Any, base: Any, alpha: Any) -> tuple[list[Tensor], list[str], bool]:
    """Two steps; the whole factors, the paths of what has optimizer state, whether the base is."""
    adapted, tree_of = zfunc.lora(apply_fn, params(), RANKS, key=KEY, base=base, alpha=alpha)
    step = zfunc.shard(
        lambda p, x: adapted(p, x).square().mean(), mesh, trainable=adapted.trainable
    )
    state = step.init(tree_of, optim.adamw(0.1))
    for number in range(2):
        state, _ = step(state, batches(number, mesh.size)[mesh.rank])
    after = zfunc.gather(state.params)
    same = tree.leaves(after["base"]), tree.leaves(tree_of["base"])
    unchanged = all(torch.equal(a, b) for a, b in zip(*same, strict=True))
    return tree.leaves(after["factors"]), tree.leaf_paths(state.opt_state), unchanged


@pytest.mark.parametrize("alpha", [None, 3.0])
@pytest.mark.parametrize("base", [None, "int8"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equal_to_the_dense_run(world: int, base: Any, alpha: Any) -> None:
    """The equations on whole matrices, by plain autograd."""
    whole, first = params(), zfunc.lora(apply_fn, params(), RANKS, key=KEY)[1]["factors"]
    if base:
        for block in whole["blocks"]:
            block["w"] = dequantise(quantise(block["w"]))
        whole["head"] = dequantise(quantise(whole["head"]))

    def loss(factors: Any, x: Tensor) -> Tensor:
        for i, block in enumerate(whole["blocks"]):
            pair = factors[f"blocks/{i}/w"]
            scale = 1.0 if alpha is None else alpha / 2
            x = torch.tanh(x @ block["w"] + scale * (x @ pair["a"] @ pair["b"]) + block["b"])
        scale = 1.0 if alpha is None else alpha
        pair = factors["head"]
        return (x @ whole["head"] + scale * (x @ pair["a"] @ pair["b"])).square().mean()

    oracle = Oracle(loss, first, Adamw(0.1), axes={"shard": world})
    for number in range(2):
        oracle.step([[x] for x in batches(number, world)])
    for factors, paths, unchanged in ranks(world, train, base, alpha):
        assert_equal(factors, oracle.tensors, 1e-10)
        assert unchanged and not any("base" in path for path in paths)


def test_on_processes() -> None:
    for got, wanted in zip(
        run_ranks(2, train, "int8", 4.0), ranks(2, train, "int8", 4.0), strict=True
    ):
        assert_equal(got[0], wanted[0])


@given(st.integers(0, 100), st.sampled_from([torch.float32, torch.float64]))
def test_merge_and_unmerge(seed: int, dtype: torch.dtype) -> None:
    adapted, tree_of = zfunc.lora(apply_fn, params(dtype), RANKS, key=random.key(seed), alpha=0.5)
    for pair in tree_of["factors"].values():
        pair["a"].normal_(generator=torch.Generator().manual_seed(seed))
    merged = adapted.merge(tree_of)
    x = batches(seed, 1)[0].to(dtype)
    assert torch.equal(apply_fn(merged, x), adapted(tree_of, x))
    again = adapted.unmerge(merged, tree_of)
    plain = zfunc.lora(apply_fn, params(dtype), RANKS, key=KEY)[1]["base"]
    eps = torch.finfo(dtype).eps
    for got, base, sum_of in zip(*map(tree.leaves, (again, plain, merged)), strict=True):
        # Two roundings, half a unit each: of the sum, and of the difference.
        bound = eps / 2 * (sum_of.abs() + got.abs()) if base.is_floating_point() else 0
        assert bool(((got - base).abs() <= bound).all())


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), max_size=40),
    st.integers(1, 9),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_eight_bits_are_off_by_half_a_step(numbers: list[float], block: int, dtype: Any) -> None:
    x = torch.tensor(numbers).clamp(-6e4, 6e4).to(dtype)
    q = quantise(x, block)
    assert q.values.dtype == torch.int8 and q.values.shape == (
        math.ceil(len(numbers) / block),
        block,
    )
    wide = (q.values.double() * q.scales.double()).reshape(-1)
    steps = q.scales.double().expand(-1, block).reshape(-1)
    assert not wide[len(numbers) :].any()
    off = (wide[: len(numbers)] - x.double()).abs()
    assert bool((off <= 0.5 * steps[: len(numbers)] * (1 + 1e-5) + smallest(dtype)).all())
    assert dequantise(q).dtype == dtype and dequantise(q).shape == x.shape
    assert torch.equal(dequantise(q), wide[: len(numbers)].float().to(dtype))


def smallest(dtype: torch.dtype) -> float:
    """Where a scale is denormal it is itself rounded: 127 times half of the smallest number."""
    return 127 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: zfunc.lora(apply_fn, params(), {"blocks/*/b": 1}, key=KEY), zfunc.LayoutError,
         r"blocks/0/b cannot be adapted"),
        (lambda: zfunc.lora(apply_fn, params(), {"tail": 1}, key=KEY), zfunc.TreeMismatchError,
         "'tail' matches no leaf"),
        (lambda: zfunc.lora(apply_fn, params(), {"head": 0}, key=KEY), ValueError, "rank 0"),
        (lambda: zfunc.lora(apply_fn, params(), {"head": 1}, key=KEY, base="int4"), ValueError,
         "base='int4'"),
        (lambda: quantise(torch.tensor([1.0, math.inf])), ValueError, "finite"),
        (lambda: quantise(torch.arange(3)), ValueError, "finite real numbers"),
        (lambda: quantise(torch.ones(3), 0), ValueError, "block=0"),
    ],
)  # fmt: skip
def test_wrong_arguments(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_unfreezing_the_base_between_steps() -> None:
    adapted, tree_of = zfunc.lora(apply_fn, params(), RANKS, key=KEY)

    def run(mesh: Any) -> None:
        def loss(p: Any, x: Tensor) -> Tensor:
            return adapted(p, x).square().mean()

        first = zfunc.shard(loss, mesh, trainable=adapted.trainable)
        state, _ = first(first.init(tree_of, optim.sgd(0.1)), batches(0, 2)[mesh.rank])
        before = tree.leaves(zfunc.gather(state.params))
        whole = zfunc.shard(loss, mesh)
        state, _ = whole(whole.adopt(state), batches(1, 2)[mesh.rank])
        after = tree.leaves(zfunc.gather(state.params))
        changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        floats = [x.is_floating_point() for x in after]
        assert changed == floats

    ranks(2, run)


def big() -> dict[str, Tensor]:
    return {f"w{i}": torch.randn(256, 256) / 16 for i in range(8)}


def chained(p: Any, x: Tensor) -> Tensor:
    for name in sorted(p):
        x = torch.tanh(x @ p[name])
    return x.square().mean()


def held(mesh: Any, base: Any) -> tuple[int, int, int]:
    """Predicted and measured bytes of parameters, gradients and optimizer; bytes gathered."""
    torch.manual_seed(0)
    tree_of, function, trainable = big(), chained, True
    if base:
        adapted, tree_of = zfunc.lora(chained, tree_of, {"**": 8}, key=KEY, base=base)
        function, trainable = adapted, adapted.trainable
    step = zfunc.shard(function, mesh, trainable=trainable)
    state, x = step.init(tree_of, optim.adamw(0.1)), torch.ones(4, 256)
    _, grads = step.value_and_grad(state.params, x)
    measured = sum(leaf.nbytes for leaf in tree.leaves((state.params, grads, state.opt_state)))
    lowered = step.lower(state, x)
    plan = lowered.memory_analysis()
    predicted = plan.params_bytes + plan.grads_bytes + plan.opt_bytes
    return predicted, measured, lowered.cost_analysis().gathered_bytes


def test_bytes_of_an_adapted_base_in_eight_bits() -> None:
    """A third at most of full fine-tuning, and about a quarter of the traffic for the base."""
    (full, full_measured, full_gathered), *_ = ranks(2, held, None)
    (small, small_measured, small_gathered), *_ = ranks(2, held, "int8")
    assert abs(full - full_measured) <= 64 * 8 and abs(small - small_measured) <= 64 * 24
    assert small_measured <= 0.3 * full_measured
    base = (1 + 4 / 64) / 4
    factors = 2 * 8 / 256
    assert small_gathered / full_gathered == pytest.approx(base + factors, rel=0.02)
