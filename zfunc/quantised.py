"""Tensors in eight bits: blocks of elements that share a scale.

An element is a whole number from -127 to 127 times the scale of its block, the largest magnitude in
the block over 127 (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section
2.1, with even steps). Both parts are ordinary leaves, so a step shards and gathers them as they
are: about a quarter of the bytes of float32 travel, and are widened where they are used.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.tree import register_node

__all__ = ["Quantised", "dequantise", "quantise"]

_LARGEST = 127


@dataclasses.dataclass(frozen=True, slots=True)
class Quantised:
    """A tensor in blocks; a node of a tree with two leaves.

    Attributes:
        values: int8 [blocks, elements of a block], the last block filled up with zeros.
        scales: [blocks, 1], in the dtype of the tensor.
        shape: the shape of the tensor.
    """

    values: Any
    scales: Any
    shape: tuple[int, ...]


def quantise(x: Tensor, block: int = 64) -> Quantised:
    """Rounds a tensor to eight bits; an element is off by half of its block's scale at most.

    Args:
        x: a floating tensor of any shape.
        block: how many elements share a scale, in the order of `x.reshape(-1)`.

    Returns:
        The blocks; they are widened to the dtype of their scales, at first that of `x`.

    Raises:
        ValueError: a `block` below 1, or a value that is not finite or no real number.

    Example:
        >>> q = quantise(torch.tensor([1.0, -0.5, 0.0]), block=2)
        >>> q.values.tolist(), dequantise(q)
        ([[127, -64], [0, 0]], tensor([ 1.0000, -0.5039,  0.0000]))
    """
    if block < 1:
        raise ValueError(f"block={block} must be 1 or more")
    if not x.is_floating_point() or not torch.isfinite(x).all():
        raise ValueError(f"only finite real numbers can be quantised, got {x.dtype} with others")
    flat = x.detach().reshape(-1).to(torch.float32)
    count = math.ceil(flat.numel() / block)
    rows = torch.zeros(count * block, device=x.device)
    rows[: flat.numel()] = flat
    rows = rows.view(count, block)
    scales = (rows.abs().amax(1, keepdim=True) / _LARGEST).to(x.dtype)
    steps = torch.where(scales > 0, rows / scales.to(torch.float32), 0.0)
    values = steps.round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return Quantised(values, scales, tuple(x.shape))


def dequantise(x: Any) -> Any:
    """Widens a `Quantised`; anything else is returned as it is."""
    if not isinstance(x, Quantised):
        return x
    flat = (x.values.to(torch.float32) * x.scales.to(torch.float32)).reshape(-1)
    return flat[: math.prod(x.shape)].view(x.shape).to(x.scales.dtype)


def _flatten(x: Quantised) -> tuple[tuple[Any, Any], Any, tuple[str, str]]:
    return (x.values, x.scales), x.shape, ("values", "scales")


def _unflatten(shape: tuple[int, ...], children: Any) -> Quantised:
    values, scales = children
    return Quantised(values, scales, shape)


register_node(Quantised, _flatten, _unflatten, path_entry_type=optree.GetAttrEntry)
