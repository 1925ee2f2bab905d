"""Optimizers written out from their papers, for `tests.oracle.Oracle` or one leaf at a time.

Each is a pure rule for one whole leaf: `start(param)` makes its memory, `apply` returns the new
leaf. A complex leaf is a leaf of reals with one dim more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

__all__ = ["Adagrad", "Lamb", "Lion", "trained"]


@dataclasses.dataclass(frozen=True)
class Lion:
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2."""

    lr: float
    b1: float = 0.9
    b2: float = 0.99
    decay: float = 1e-3

    def start(self, param: Tensor) -> dict[str, Any]:
        return {"count": 0, "m": torch.zeros_like(_real(param))}

    def apply(self, param: Tensor, grad: Tensor, memory: dict[str, Any], decays: bool) -> Tensor:
        memory["count"] += 1
        theta, g, m = _real(param), _real(grad), memory["m"]
        c = self.b1 * m + (1 - self.b1) * g
        sign = (c > 0).to(c.dtype) - (c < 0).to(c.dtype)
        theta = theta - self.lr * (sign + (self.decay if decays else 0.0) * theta)
        memory["m"] = self.b2 * m + (1 - self.b2) * g
        return _like(theta, param)


@dataclasses.dataclass(frozen=True)
class Adagrad:
    """Duchi et al. 2011, "Adaptive Subgradient Methods", figure 1, delta after the root."""

    lr: float
    begin: float = 0.0
    delta: float = 1e-10

    def start(self, param: Tensor) -> dict[str, Any]:
        return {"count": 0, "s": torch.full_like(_real(param), self.begin)}

    def apply(self, param: Tensor, grad: Tensor, memory: dict[str, Any], decays: bool) -> Tensor:
        memory["count"] += 1
        g = _real(grad)
        memory["s"] = memory["s"] + g * g
        return _like(_real(param) - self.lr * g / (memory["s"].sqrt() + self.delta), param)


@dataclasses.dataclass(frozen=True)
class Lamb:
    """You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2, phi(z) = z.

    The ratio is kept within bounds, and is 1 where it would be 0 / 0.
    """

    lr: float
    decay: float = 0.0
    eps: float = 1e-6
    low: float = 0.0
    high: float = float("inf")

    def start(self, param: Tensor) -> dict[str, Any]:
        zeros = torch.zeros_like(_real(param))
        return {"count": 0, "m": zeros, "v": zeros}

    def apply(self, param: Tensor, grad: Tensor, memory: dict[str, Any], decays: bool) -> Tensor:
        memory["count"] += 1
        x, g, t = _real(param), _real(grad), memory["count"]
        memory["m"] = 0.9 * memory["m"] + 0.1 * g
        memory["v"] = 0.999 * memory["v"] + 0.001 * g**2
        r = (memory["m"] / (1 - 0.9**t)) / ((memory["v"] / (1 - 0.999**t)).sqrt() + self.eps)
        direction = r + (self.decay if decays else 0.0) * x
        norms = float((x**2).sum()) ** 0.5, float((direction**2).sum()) ** 0.5
        ratio = min(max(norms[0] / norms[1], self.low), self.high) if all(norms) else 1.0
        return _like(x - self.lr * ratio * direction, param)


def trained(rule: Any, params: dict[str, Tensor], steps: list[dict[str, Tensor]]) -> Any:
    """The leaves after all updates."""
    after = {}
    for name, leaf in params.items():
        memory = rule.start(leaf)
        for grads in steps:
            leaf = rule.apply(leaf, grads[name], memory, True)
        after[name] = leaf
    return after


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _like(x: Tensor, param: Tensor) -> Tensor:
    return torch.view_as_complex(x) if param.is_complex() else x
