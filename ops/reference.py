"""What every kernel computes, in plain torch: the oracle of the tests and the fallback.

Each line below is one IEEE operation per element, rounded once to the dtype of the tensor, and
scalars are computed in float64 and rounded to that dtype. The compiled kernels do the same
operations in the same order, without fused multiply-add, so the results are equal bit for bit
(0 ulp) on every instruction set and for any number of threads. A NaN is equal to any NaN: its
payload is not defined.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["BLOCK", "LANES", "ROWS", "adamw_", "nonfinite", "sum_squares"]

LANES = 32
ROWS = 32
BLOCK = LANES * ROWS


def _sqrt(x: Tensor) -> Tensor:
    # torch.sqrt on a CPU is off by one ulp for 0.7 % of float32 inputs (it calls a vector
    # library); numpy's is the processor's instruction, which IEEE defines to the last bit.
    if x.device.type != "cpu":
        return x.sqrt()
    root = torch.empty_like(x)
    with np.errstate(invalid="ignore"):
        np.sqrt(x.detach().numpy(), out=root.numpy())
    return root


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    *,
    step_size: Sequence[float],
    nu_scale: Sequence[float],
    decay: Sequence[float],
    b1: float,
    b2: float,
    eps: float,
    grad_scale: float,
) -> None:
    """One AdamW update of each leaf, in place.

    The decay is added to the Adam step before either is subtracted: `p * (1 - lr * decay)`, as
    often written, rounds to `p` in float32 when `lr * decay < 2**-25`.

    Args:
        params, grads, mu, nu: one tensor per leaf.
        step_size: `lr / (1 - b1**t)` per leaf, t the leaf's number of updates, this one included.
        nu_scale: `1 / sqrt(1 - b2**t)` per leaf.
        decay: `lr * weight_decay` per leaf.
        b1, b2, eps: as in Adam (Kingma and Ba, algorithm 1).
        grad_scale: factor on the gradient.
    """
    for i, (p, g, m, v) in enumerate(zip(params, grads, mu, nu, strict=True)):
        g = g * grad_scale
        m.copy_(b1 * m + (1 - b1) * g)
        v.copy_(b2 * v + ((1 - b2) * g) * g)
        denom = _sqrt(v) * nu_scale[i] + eps
        p.copy_(p - ((step_size[i] * m) / denom + decay[i] * p))


def _block_sums(x: Tensor) -> Tensor:
    lanes = torch.zeros(x.shape[0], LANES, dtype=torch.float64, device=x.device)
    for row in x.view(-1, ROWS, LANES).unbind(1):
        value = row.to(torch.float64)
        lanes = lanes + value * value
    width = LANES // 2
    while width:
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
        width //= 2
    return lanes[:, 0]


@torch.no_grad()
def sum_squares(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sum of squares of each tensor as a 0-d float64 tensor.

    The elements, in row-major order and padded with zeros, form blocks of 32 rows of 32 lanes.
    Squares are added down the rows, lane by lane; then lane `l` and `l + 16`, `l + 8`, ... `l + 1`;
    then neighbouring blocks, pair by pair, level by level. A complex number is two elements.
    """
    return [_sum_squares(x) for x in tensors]


def _sum_squares(x: Tensor) -> Tensor:
    flat = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    sums = [_block_sums(flat[:whole].view(-1, BLOCK))]
    if whole < flat.numel():
        last = torch.zeros(BLOCK, dtype=torch.float64, device=x.device)
        last[: flat.numel() - whole] = flat[whole:].to(torch.float64)
        sums.append(_block_sums(last.view(1, BLOCK)))
    total = torch.cat(sums)
    while total.numel() > 1:
        if total.numel() % 2:
            total = torch.cat([total, total.new_zeros(1)])
        total = total[0::2] + total[1::2]
    return total.sum()


@torch.no_grad()
def nonfinite(tensors: Sequence[Tensor]) -> bool:
    """Whether any element of any tensor is NaN or infinite."""
    return any(_nonfinite(x) for x in tensors)


def _nonfinite(x: Tensor) -> bool:
    if not (x.is_floating_point() or x.is_complex()):
        return False
    real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    wide = real.to(torch.float32) if real.itemsize == 1 else real
    return not bool(torch.isfinite(wide).all())
