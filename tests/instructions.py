"""Instructions of random losses: each takes a vector of four numbers and one or two leaves of any
kind, and gives another vector. The caller clamps it, so that small integers stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zfunc

__all__ = ["INSTRUCTIONS", "WIDTH"]

WIDTH = 4


def real(x: Tensor) -> Tensor:
    """A leaf, or its real part."""
    return x.real if x.is_complex() else x


def vector(x: Tensor) -> Tensor:
    """Any leaf as a vector of float64."""
    return real(x).reshape(-1).double()


def padded(x: Tensor, size: int = WIDTH) -> Tensor:
    """The first elements of a leaf, and zeros behind them."""
    flat = vector(x)[:size]
    return F.pad(flat, (0, size - flat.numel()))


def square(x: Tensor) -> Tensor:
    """A leaf as a matrix."""
    return padded(x, WIDTH * WIDTH).reshape(WIDTH, WIDTH)


def bounded(x: Tensor) -> Tensor:
    return x.clamp(-8, 8)


# Uses of leaves.


def _tied(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    size = min(a.numel(), b.numel(), 5)
    return h + (vector(a)[:size] * vector(b)[:size]).sum()


def _embedding(h: Tensor, a: Tensor, _: Tensor, batch: Any) -> Tensor:
    return h + F.embedding(batch["index"], padded(a).reshape(-1, 1)).reshape(-1)


def _complex_norm(h: Tensor, a: Tensor, _: Tensor, __: Any) -> Tensor:
    return h + (a * a.conj()).real.sum().double() if a.is_complex() else h + vector(a).sum()


def _again_and_again(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    for _turn in range(1 + a.dim()):
        h = bounded(square(a) @ h + padded(b))
    return h


# Views and writes in place.


def _views(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    one, other = square(a), square(b)
    rows = one.t()[1:3].reshape(-1)[:WIDTH] + one.diagonal()
    return h + rows + other.unsqueeze(0).permute(2, 0, 1).expand(4, 3, 4)[1, 2] + other[:, 2]


def _in_place(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    out = h * 1
    out.add_(padded(a))
    out[0] += 1
    out[1:3].mul_(2)
    out.relu_()
    return out + padded(b)


def _in_place_through_views(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    out = square(a) * 1
    out.t()[1:3].mul_(2)
    out[0] += h
    out.diagonal().add_(padded(b))
    return out.sum(0)


def _copied_in(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    out = torch.zeros(3, WIDTH, dtype=h.dtype)
    out[0] = h
    out[1].copy_(padded(a))
    out[2, 1:] = padded(b)[:3]
    return out.sum(0)


def _joined(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    return torch.cat([h[:2], padded(a)[2:]]) + torch.where(h > 0, padded(b), h)


# Control flow.


def _branch(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    return -h if a.dim() % 2 else h + padded(b)


def _by_step(h: Tensor, a: Tensor, b: Tensor, batch: Any) -> Tensor:
    return h + padded(a) if batch["step"] % 2 else square(b) @ h


def _looks(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    return h + padded(a) if float(h.detach().sum()) > 0 else h - padded(b)


# Recomputation and derivatives inside.


def _remat(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    @zfunc.remat
    def block(h: Tensor) -> Tensor:
        return bounded(torch.relu(square(a) @ h)) * (1 + padded(b))

    return block(bounded(block(h)))


def _nested_remat(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    @zfunc.remat
    def inner(h: Tensor) -> Tensor:
        out = bounded(square(a) @ h)
        return torch.relu_(out + 1) * padded(b)

    @zfunc.remat
    def outer(h: Tensor) -> Tensor:
        return bounded(inner(bounded(inner(h)))) + padded(a)

    return outer(h)


def _tiled(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    rows = zfunc.tiled(lambda w, h: torch.relu(w @ h), (0, None), 3)
    columns = zfunc.tiled(lambda w, h: w @ h, (1, 0), 3, out="sum")
    return columns(square(b), bounded(rows(square(a), h))) + padded(a)


def _checkpointed(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    def block(h: Tensor, w: Tensor) -> Tensor:
        return torch.relu(w @ h) + padded(b)

    out = checkpoint(block, h, square(a), use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


def _gradient_inside(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    x = h.detach().requires_grad_()
    (inside,) = torch.autograd.grad((x * padded(a)).square().sum(), x, create_graph=True)
    return h + bounded(inside) * padded(b)


def _functional_gradient(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    def energy(x: Tensor) -> Tensor:
        return (x * padded(a)).square().sum()

    return bounded(torch.func.grad(energy)(h)) + padded(b)


class _Doubled(torch.autograd.Function):
    """max(2 x y, 0) with a derivative of its own."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return (2 * x * y).relu()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y, out = ctx.saved_tensors
        grad = 2 * grads[0] * (out > 0)
        return grad * y, grad * x


def _custom(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    out = _Doubled.apply(h, padded(a))
    assert isinstance(out, Tensor)
    return out + padded(b)


INSTRUCTIONS: Mapping[str, Callable[[Tensor, Tensor, Tensor, Any], Tensor]] = {
    "add": lambda h, a, b, _: h + padded(a),
    "sum": lambda h, a, b, _: h + vector(a).sum(),
    "matmul": lambda h, a, b, _: square(a) @ h,
    "transposed": lambda h, a, b, _: square(a).t() @ h + padded(b.flatten()[-2:]),
    "tied": _tied,
    "stacked": lambda h, a, b, _: torch.stack([padded(a), padded(b), padded(a)]).sum(0) * h,
    "from parameters": lambda h, a, b, _: h * (vector(a) ** 2).sum().clamp(max=3) + padded(b),
    "cast": lambda h, a, b, _: h + padded(real(a).to(torch.float32).to(torch.bfloat16)),
    "relu": lambda h, a, b, _: torch.relu(h) * padded(a),
    "largest": lambda h, a, b, _: h * padded(a).amax() - padded(b).amin(),
    "frozen here": lambda h, a, b, _: h + padded(a.detach()) * padded(b),
    "batch": lambda h, a, b, batch: h + batch["x"].sum() * padded(a),
    "embedding": _embedding,
    "complex": _complex_norm,
    "again and again": _again_and_again,
    "views": _views,
    "in place": _in_place,
    "in place through views": _in_place_through_views,
    "copied in": _copied_in,
    "joined": _joined,
    "branch": _branch,
    "by step": _by_step,
    "remat": _remat,
    "nested remat": _nested_remat,
    "tiled": _tiled,
    "checkpointed": _checkpointed,
    "gradient inside": _gradient_inside,
    "functional gradient": _functional_gradient,
    "custom": _custom,
    "looks at a value": _looks,
}
