"""Blocks of networks, and losses made of them in nested remat regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc.rematerialise import remat

__all__ = [
    "BLOCKS",
    "DERIVATIONS",
    "ROWS",
    "attention",
    "dropout",
    "final_tanh",
    "finish",
    "in_place",
    "inputs",
    "loss_of",
    "nested",
    "transformer",
    "views",
    "weights",
]

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
