"""Optimizers written out from their papers, for `tests.oracle.Oracle` or one leaf at a time.

Each is a pure rule for one whole leaf: `start(param)` makes its memory, `apply` returns the new
leaf. A complex leaf is a leaf of reals with one dim more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Adafactor", "Adagrad", "Lamb", "Lion", "Muon", "trained"]


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


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Shazeer and Stern 2018, "Adafactor", algorithms 4 and 5, with the sums R and C as means.

    A complex number counts with its absolute value.
    """

    lr: Callable[[int], float]
    least: int = 1
    threshold: float = 1.0
    decay: float = 0.0

    def start(self, param: Tensor) -> dict[str, Any]:
        return {"count": 0, "rows": 0.0, "columns": 0.0, "all": 0.0}

    def apply(self, param: Tensor, grad: Tensor, memory: dict[str, Any], decays: bool) -> Tensor:
        memory["count"] += 1
        t = memory["count"]
        beta = 1 - t**-0.8
        squares = (grad * grad.conj()).real + 1e-30
        if param.ndim == 2 and min(param.shape) >= self.least:
            memory["rows"] = beta * memory["rows"] + (1 - beta) * squares.mean(1)
            memory["columns"] = beta * memory["columns"] + (1 - beta) * squares.mean(0)
            v = torch.outer(memory["rows"], memory["columns"]) / memory["rows"].mean()
        else:
            v = memory["all"] = beta * memory["all"] + (1 - beta) * squares
        u = grad / v.sqrt()
        u = u / max(1.0, _rms(u) / self.threshold)
        u = max(1e-3, _rms(param)) * u + (self.decay if decays else 0.0) * param
        return param - self.lr(t) * u


@dataclasses.dataclass(frozen=True)
class Muon:
    """Jordan et al. 2024, "Muon", on matrices; the iteration on singular values, not matrices."""

    lr: float
    decay: float = 0.0

    def start(self, param: Tensor) -> dict[str, Any]:
        return {"count": 0, "m": torch.zeros_like(param)}

    def apply(self, param: Tensor, grad: Tensor, memory: dict[str, Any], decays: bool) -> Tensor:
        memory["count"] += 1
        memory["m"] = 0.95 * memory["m"] + 0.05 * grad
        ahead = 0.95 * memory["m"] + 0.05 * grad
        u, s, v = torch.linalg.svd(ahead, full_matrices=False)
        s = s / max(float((s**2).sum()) ** 0.5, 1e-7)
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
        direction = scale * u @ torch.diag(s) @ v
        return param - self.lr * (direction + (self.decay if decays else 0.0) * param)


def trained(rule: Any, params: dict[str, Tensor], steps: list[dict[str, Tensor]]) -> Any:
    """The leaves after all updates."""
    after = {}
    for name, leaf in params.items():
        memory = rule.start(leaf)
        for grads in steps:
            leaf = rule.apply(leaf, grads[name], memory, True)
        after[name] = leaf
    return after


def _rms(x: Tensor) -> float:
    return float(x.abs().square().mean()) ** 0.5


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _like(x: Tensor, param: Tensor) -> Tensor:
    return torch.view_as_complex(x) if param.is_complex() else x
