"""The GPT of the benchmarks: 33.7M parameters with the defaults, the same for every system."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "batch", "loss_of"]


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # x [batch, tokens, width]
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (h.view(b, t, self.heads, -1).transpose(1, 2) for h in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(
        self,
        vocab: int = 8192,
        width: int = 512,
        layers: int = 8,
        heads: int = 8,
        tokens: int = 128,
    ):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, batch: Tensor) -> Tensor:  # batch [sequences, tokens + 1] -> loss []
        x, y = batch[:, :-1], batch[:, 1:]
        h = self.emb(x) + self.pos.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def loss_of(module: nn.Module):
    """The module as a pure loss of a flat dict of parameters."""

    def loss_fn(params: dict[str, Tensor], batch: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, (batch,), strict=True)

    return loss_fn


def batch(step: int, rank: int, vocab: int = 8192, sequences: int = 4, tokens: int = 128) -> Tensor:
    """Random token ids of one rank and step."""
    generator = torch.Generator().manual_seed(step * 100 + rank)
    return torch.randint(0, vocab, (sequences, tokens + 1), generator=generator)
