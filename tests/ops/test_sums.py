"""`ops.sum_squares` and `ops.nonfinite`: one order of additions, whoever computes it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zfunc import ops
from zfunc.ops import reference

KERNEL_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [*range(130), 1023, 1024, 1025, 2048, 3000, 65535, 65536, 65537, 5 * 65536 + 1029]


@pytest.fixture(params=ops.isas() or ("none",))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "none":
        pytest.skip("no compiled kernels")
    monkeypatch.setenv("ZFUNC_ISA", request.param)
    return request.param


def draw(n: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(n + offset)
    return torch.randn(n + offset, generator=source, dtype=torch.float64).to(dtype)[offset:]


def by_hand(values: list[float]) -> float:
    """The documented order in plain Python."""
    blocks = []
    for begin in range(0, len(values), 1024):
        lanes = [0.0] * 32
        for i, v in enumerate(values[begin : begin + 1024]):
            lanes[i % 32] += v * v
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        blocks += lanes
    while len(blocks) > 1:
        blocks += [0.0] * (len(blocks) % 2)
        blocks = [a + b for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
    return blocks[0] if blocks else 0.0


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1024, 1025, 7 * 1024 + 5, 65 * 1024 + 77])
def test_the_order_is_the_documented_one(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(n, torch.float64) * 10.0 ** (draw(n + 1, torch.float64)[1:] * 4)
    want = torch.tensor([by_hand(x.tolist())], dtype=torch.float64)
    assert torch.equal(ops.sum_squares([x]), want)
    monkeypatch.setenv("ZFUNC_NATIVE", "0")
    assert torch.equal(ops.sum_squares([x]), want)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_every_size_equals_the_reference(isa: str, dtype: torch.dtype) -> None:
    tensors = [draw(n, dtype) for n in SIZES]
    assert torch.equal(ops.sum_squares(tensors), torch.stack(reference.sum_squares(tensors)))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_misaligned_starts(isa: str, dtype: torch.dtype, offset: int) -> None:
    tensors = [draw(n, dtype, offset) for n in (1, 32, 1000, 70_000)]
    assert torch.equal(ops.sum_squares(tensors), torch.stack(reference.sum_squares(tensors)))


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_change_no_bit(isa: str, threads: int) -> None:
    tensors = [draw(n) for n in (400_001, 0, 5, 65536, 200_000)]
    want = torch.stack(reference.sum_squares(tensors))
    assert torch.equal(ops.sum_squares(tensors, threads=threads), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_half_precision_values(isa: str, dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    tensors = list(every[every.isfinite()].unsqueeze(1).unbind(0))
    want = torch.cat(tensors).double().square()
    assert torch.equal(ops.sum_squares(tensors), want)


def test_close_to_the_exact_sum() -> None:
    x = draw(300_000)
    exact = math.fsum(v * v for v in x.tolist())
    # Depth of the additions: 32 rows, 5 levels of lanes, 9 levels of blocks.
    assert abs(ops.sum_squares([x]).item() - exact) <= (32 + 5 + 9) * 2.0**-53 * exact


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_nan_and_infinity_propagate(
    dtype: torch.dtype, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFUNC_NATIVE", native)
    for n, at in ((1, 0), (33, 32), (3000, 1500), (70_000, 69_999)):
        x = draw(n, dtype)
        for bad, check in ((math.nan, torch.isnan), (math.inf, torch.isposinf)):
            x[at] = bad
            assert check(ops.sum_squares([x])).all()
            assert ops.nonfinite([draw(5, dtype), x])
            assert not ops.all_finite([x])
        x[at] = -math.inf
        assert ops.sum_squares([x]).item() == math.inf
        assert ops.nonfinite([x])
        x[at] = 1.0
        assert ops.all_finite([x])


def test_the_largest_finite_values(isa: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.full((3000,), torch.finfo(dtype).max, dtype=dtype)
        assert ops.sum_squares([x]).isfinite().all()
        assert ops.all_finite([x])
    x = torch.full((3000,), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert ops.sum_squares([x]).item() == math.inf
    assert ops.all_finite([x])


def test_subnormals_count(isa: str) -> None:
    for dtype in KERNEL_DTYPES:
        x = torch.full((100,), torch.finfo(dtype).smallest_normal / 4, dtype=dtype)
        assert torch.equal(ops.sum_squares([x]), torch.stack(reference.sum_squares([x])))
        assert ops.all_finite([x])


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(st.lists(FLOATS, max_size=40), max_size=5), st.sampled_from(KERNEL_DTYPES))
def test_nonfinite_is_what_torch_says(rows: list[list[float]], dtype: torch.dtype) -> None:
    tensors = [torch.tensor(row, dtype=torch.float64).to(dtype) for row in rows]
    finite = all(bool(x.isfinite().all()) for x in tensors)
    assert ops.nonfinite(tensors) is (not finite)
    assert reference.nonfinite(tensors) is (not finite)


@pytest.mark.parametrize("native", ["0", "1"])
def test_other_dtypes_and_strides(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_NATIVE", native)
    z = torch.complex(draw(50), draw(51)[1:])
    f8 = draw(40).to(torch.float8_e5m2)
    integers, flags = torch.arange(-5, 70), torch.tensor([True, False, True])
    for x in (z, z.conj(), z.to(torch.complex128)):
        want = x.real.double().square().sum() + x.imag.double().square().sum()
        torch.testing.assert_close(ops.sum_squares([x])[0], want, rtol=1e-14, atol=0)
        assert ops.all_finite([x])
    got = ops.sum_squares([f8, integers, flags])
    want = [f8.double().square().sum(), integers.square().sum().double(), torch.tensor(2.0)]
    torch.testing.assert_close(got, torch.stack([w.double() for w in want]), rtol=1e-14, atol=0)
    assert ops.all_finite([f8, integers, flags])
    assert ops.nonfinite([torch.tensor([1.0, math.inf]).to(torch.float8_e5m2)])
    assert ops.nonfinite([torch.tensor([complex(0.0, math.nan)])])
    rows = draw(120).reshape(10, 12)
    same = torch.stack(reference.sum_squares([rows.t().contiguous()]))
    assert torch.equal(ops.sum_squares([rows.t()]), same)
    assert torch.equal(ops.sum_squares([rows.requires_grad_()]), ops.sum_squares([draw(120)]))


def test_nothing_to_sum() -> None:
    assert torch.equal(ops.sum_squares([]), torch.zeros(0, dtype=torch.float64))
    assert torch.equal(ops.sum_squares([torch.zeros(0)]), torch.zeros(1, dtype=torch.float64))
    assert ops.all_finite([]) and ops.all_finite([torch.zeros(0)])
