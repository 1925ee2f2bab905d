"""Fake quantisation: values as a few bits would hold them, gradients as if nothing had happened."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["FakeQuantise", "Levels"]


@dataclasses.dataclass(frozen=True, slots=True)
class Levels:
    """A tensor as whole numbers in groups: `(numbers - zeros) * scales`.

    Attributes:
        numbers: int8 or uint8 [groups, elements], the last group filled up.
        scales: float32 [groups, 1].
        zeros: float32 [groups, 1], whole numbers.
        shape: the shape of the tensor.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    shape: tuple[int, ...]

    def values(self, dtype: torch.dtype) -> Tensor:
        """The tensor that they stand for."""
        rows = (self.numbers.to(torch.float32) - self.zeros) * self.scales
        return rows.reshape(-1)[: math.prod(self.shape)].view(self.shape).to(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class FakeQuantise:
    """Rounds a leaf to `bits` bits in groups that share a scale; its gradient passes unchanged.

        symmetric:   s = max|x| / (2**(bits - 1) - 1),        y = round(x / s) * s
        asymmetric:  s = (max x - min x) / (2**bits - 1),     y = (round(x / s) - z) * s

    with 0 among the levels (z = round(min x / s), the range made to hold 0). Jacob et al. 2018,
    "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
    sections 2 and 3; the straight-through gradient is that of Bengio et al. 2013. What is rounded
    is float32.

    Args:
        bits: 2 to 8.
        per: what shares a scale: the whole "tensor", a "channel" (an index of dim 0, the outputs of
            a torch layer), or so many elements in the order of `x.reshape(-1)`.
        symmetric: whether levels lie evenly around 0.

    Raises:
        ValueError: an argument out of its range.

    Example:
        >>> FakeQuantise(bits=2, per="tensor")(torch.tensor([1.0, 0.6, -0.7, 0.2]))
        tensor([ 1.,  1., -1.,  0.])
    """

    bits: int = 8
    per: Literal["tensor", "channel"] | int = "channel"
    symmetric: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits} must be 2 to 8")
        if self.per not in ("tensor", "channel") and not (
            isinstance(self.per, int) and self.per > 0
        ):
            raise ValueError(f"per={self.per!r} must be 'tensor', 'channel' or a block's elements")

    def __call__(self, x: Tensor) -> Tensor:
        """The rounded leaf, in its dtype."""
        rounded: Any = _StraightThrough.apply(x, self)
        return rounded

    def levels(self, x: Tensor) -> Levels:
        """The whole numbers that stand for a leaf."""
        rows = self._grouped(x.detach())
        if self.symmetric:
            most = 2 ** (self.bits - 1) - 1
            scales = rows.abs().amax(1, keepdim=True) / most
            numbers = _over(rows, scales).round().clamp(-most, most)
            return Levels(numbers.to(torch.int8), scales, torch.zeros_like(scales), tuple(x.shape))
        most = 2**self.bits - 1
        low = rows.amin(1, keepdim=True).clamp(max=0)
        high = rows.amax(1, keepdim=True).clamp(min=0)
        scales = (high - low) / most
        zeros = -_over(low, scales).round()
        numbers = (_over(rows, scales).round() + zeros).clamp(0, most)
        return Levels(numbers.to(torch.uint8), scales, zeros, tuple(x.shape))

    def _grouped(self, x: Tensor) -> Tensor:
        """float32 [groups, elements]."""
        flat = x.reshape(-1).to(torch.float32)
        if self.per == "tensor" or not x.numel():
            return flat.view(1, -1) if x.numel() else flat.new_zeros(1, 1)
        if self.per == "channel":
            return flat.view(x.shape[0] if x.ndim else 1, -1)
        assert isinstance(self.per, int)
        count = math.ceil(flat.numel() / self.per)
        return torch.nn.functional.pad(flat, (0, count * self.per - flat.numel())).view(count, -1)


def _over(x: Tensor, scales: Tensor) -> Tensor:
    return torch.where(scales > 0, x / scales, 0.0)


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rule: FakeQuantise) -> Tensor:
        return rule.levels(x).values(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return grad, None
