"""`ops.adamw_`: the kernel equals its definition bit for bit, the definition equals torch.optim."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zfunc import ops
from zfunc.ops import reference

RATES = {"lr": 3e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SIZES = [*range(130), 1023, 65535, 65536, 65537, 3 * 65536 + 17]


@pytest.fixture(params=ops.isas() or ("none",))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "none":
        pytest.skip("no compiled kernels")
    monkeypatch.setenv("ZFUNC_ISA", request.param)
    return request.param


def leaf(
    n: int, dtype: torch.dtype = torch.float32, seed: int = 0, offset: int = 0
) -> list[Tensor]:
    """Parameter, gradient and both moments, each `offset` elements into its memory."""
    source = torch.Generator().manual_seed(1000 * seed + n)
    draw = [torch.randn(n + offset, generator=source, dtype=dtype)[offset:] for _ in range(4)]
    draw[3].square_()
    return draw


def clone(leaves: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in leaves]


def bits(x: Tensor) -> Tensor:
    """The bit pattern, every NaN as one."""
    same = torch.where(x.isnan(), torch.full_like(x, math.nan), x)
    return same.view(torch.int32 if x.dtype == torch.float32 else torch.int64)


def same_bits(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


def by_reference(leaves: list[Tensor], step: int = 3, **options: float) -> list[Tensor]:
    """What reference.py makes of one leaf."""
    o = {**RATES, "grad_scale": 1.0, **options}
    p, g, m, v = clone(leaves)
    reference.adamw_(
        [p], [g], [m], [v], step_size=[o["lr"] / (1 - o["b1"] ** step)],
        nu_scale=[1 / math.sqrt(1 - o["b2"] ** step)], decay=[o["lr"] * o["weight_decay"]],
        b1=o["b1"], b2=o["b2"], eps=o["eps"], grad_scale=o["grad_scale"],
    )  # fmt: skip
    return [p, g, m, v]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_size_equals_the_reference(isa: str, dtype: torch.dtype) -> None:
    for n in SIZES:
        leaves = leaf(n, dtype)
        want = by_reference(leaves, grad_scale=0.37)
        ops.adamw_(*leaves, **RATES, step=3, grad_scale=0.37)
        assert same_bits(leaves, want), n


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 15])
def test_misaligned_starts(isa: str, offset: int) -> None:
    for n in (1, 16, 67, 1000):
        leaves = leaf(n, offset=offset)
        want = by_reference(leaves)
        ops.adamw_(*leaves, **RATES, step=3)
        assert same_bits(leaves, want), n


def test_nothing_around_a_leaf_is_touched(isa: str) -> None:
    for n in range(130):
        memory = [torch.full((n + 64,), math.nan) for _ in range(4)]
        leaves = [x[32 : 32 + n] for x in memory]
        for x, y in zip(leaves, leaf(n), strict=True):
            x.copy_(y)
        ops.adamw_(*leaves, **RATES, step=3)
        for x in memory:
            assert x[:32].isnan().all()
            assert x[32 + n :].isnan().all()
            assert x[32 : 32 + n].isfinite().all()


SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-45,
    -1e-40,
    1.2e-38,
    3e38,
    -3e38,
    1.0,
    1e-23,
]


def test_special_values(isa: str) -> None:
    p = torch.tensor(SPECIAL).repeat(len(SPECIAL))
    g = torch.tensor(SPECIAL).repeat_interleave(len(SPECIAL))
    for special in SPECIAL:
        leaves = [p.clone(), g.clone(), torch.full_like(p, special), torch.full_like(p, special)]
        want = by_reference(leaves, grad_scale=0.5)
        ops.adamw_(*leaves, **RATES, step=3, grad_scale=0.5)
        assert same_bits(leaves, want), special


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6, 10**12, 10**18])
def test_any_step_count(isa: str, step: int) -> None:
    leaves = leaf(100)
    want = by_reference(leaves, step=step)
    ops.adamw_(*leaves, **RATES, step=step)
    assert same_bits(leaves, want)
    assert all(x.isfinite().all() for x in leaves)


def test_flush_to_zero_is_the_caller_s_choice_in_every_thread(isa: str) -> None:
    leaves = [torch.full((200_000,), 1e-39) for _ in range(4)]
    kept, flushed = clone(leaves), clone(leaves)
    ops.adamw_(*kept, **RATES, step=3, threads=3)
    assert torch.set_flush_denormal(True)
    try:
        ops.adamw_(*flushed, **RATES, step=3, threads=3)
    finally:
        torch.set_flush_denormal(False)
    assert kept[2].ne(0).all()
    assert flushed[2].eq(0).all()


def random_lists(counts: list[int], dtype: torch.dtype) -> list[list[Tensor]]:
    leaves = [leaf(n, dtype, seed=i) for i, n in enumerate(counts)]
    return [list(row) for row in zip(*leaves, strict=True)] if leaves else [[], [], [], []]


@given(
    counts=st.lists(st.integers(0, 200), max_size=12),
    threads=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    data=st.data(),
)
def test_a_list_is_its_leaves_one_by_one(
    counts: list[int], threads: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    steps = [data.draw(st.integers(1, 50)) for _ in counts]
    decays = [data.draw(st.sampled_from([0.0, 0.1])) for _ in counts]
    lists = random_lists(counts, dtype)
    want = [
        by_reference([row[i] for row in lists], step=steps[i], weight_decay=decays[i])
        for i in range(len(counts))
    ]
    rates = {**RATES, "weight_decay": decays}
    ops.adamw_(*lists, **rates, step=steps, threads=threads)
    for i, expected in enumerate(want):
        assert same_bits([row[i] for row in lists], expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_threads_change_no_bit(isa: str, threads: int) -> None:
    lists = random_lists([300_001, 7, 65536, 0, 131_073], torch.float32)
    want = [by_reference([row[i] for row in lists]) for i in range(5)]
    ops.adamw_(*lists, **RATES, step=3, threads=threads)
    for i, expected in enumerate(want):
        assert same_bits([row[i] for row in lists], expected)


def test_the_fallback_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = leaf(1000)
    other = clone(leaves)
    ops.adamw_(*leaves, **RATES, step=7)
    monkeypatch.setenv("ZFUNC_NATIVE", "0")
    ops.adamw_(*other, **RATES, step=7)
    assert same_bits(leaves, other)


@pytest.mark.parametrize("native", ["0", "1"])
def test_scalars_and_matrices(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_NATIVE", native)
    for shape in ((), (0,), (3, 5), (2, 1, 4)):
        leaves = [x.reshape(shape) for x in leaf(math.prod(shape))]
        want = by_reference(leaves)
        ops.adamw_(*leaves, **RATES, step=3)
        assert same_bits(leaves, want)


@pytest.mark.parametrize("native", ["0", "1"])
def test_float64_follows_torch_optim(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_NATIVE", native)
    p, _, m, v = leaf(500, torch.float64)
    m.zero_(), v.zero_()
    twin = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW(
        [twin], lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, foreach=False
    )
    for step in range(1, 31):
        g = leaf(500, torch.float64, seed=step)[1]
        twin.grad = g.clone()
        optimizer.step()
        ops.adamw_(p, g, m, v, **RATES, step=step)
    # A few roundings per step on values of order 1.
    torch.testing.assert_close(p, twin.data, rtol=1e-13, atol=1e-13)
    state = optimizer.state[twin]
    torch.testing.assert_close(m, state["exp_avg"], rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(v, state["exp_avg_sq"], rtol=1e-13, atol=1e-15)


def test_float32_stays_within_its_roundings_of_float64() -> None:
    leaves = leaf(20_000)
    wide = [x.double() for x in leaves]
    ops.adamw_(*leaves, **RATES, step=3, grad_scale=0.3)
    ops.adamw_(*wide, **RATES, step=3, grad_scale=0.3)
    p, _, m, v = leaves
    unit = 2.0**-24
    # m and v: at most 4 roundings of their terms (b1, scale, two products or the sum).
    old_m, g = (x.double() for x in leaf(20_000)[2:0:-1])
    bound_m = 5 * unit * (0.9 * old_m.abs() + 0.1 * (0.3 * g).abs())
    assert ((m - wide[2]).abs() <= bound_m).all()
    assert ((v - wide[3]).abs() <= 6 * unit * wide[3]).all()
    # p: its own rounding, and those of the step, whose relative error is below 12 roundings of
    # the terms that make mu (terms may cancel) over the denominator.
    denom = wide[3].sqrt() / math.sqrt(1 - 0.999**3) + 1e-8
    terms = RATES["lr"] / (1 - 0.9**3) * (0.9 * old_m.abs() + 0.1 * (0.3 * g).abs()) / denom
    decay = RATES["lr"] * RATES["weight_decay"] * leaf(20_000)[0].double().abs()
    bound_p = unit * (1.001 * wide[0].abs() + 13 * (terms + decay))
    assert ((p - wide[0]).abs() <= bound_p).all()


def test_a_small_decay_is_not_rounded_away() -> None:
    p, g, m, v = torch.ones(1), torch.zeros(1), torch.full((1,), 1.0), torch.ones(1)
    rates = {"lr": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 0.0}
    with_decay = [x.clone() for x in (p, g, m, v)]
    ops.adamw_(p, g, m, v, **rates, weight_decay=0.0, step=10**6)
    ops.adamw_(*with_decay, **rates, weight_decay=3e-5, step=10**6)
    assert with_decay[0].item() < p.item()


def test_autograd_notices_the_write() -> None:
    p = torch.ones(3, requires_grad=True)
    loss = (p * p).sum()
    ops.adamw_(p, torch.ones(3), torch.zeros(3), torch.zeros(3), **RATES, step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
