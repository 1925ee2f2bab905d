"""The oracle: what a sharded step must equal, as one process that holds every leaf and every batch.

Plain autograd, one rank and one micro-batch after the other. Sums are added in the order that the
library promises: over the last axis of the mesh first, in rank order, then micro-batches in order,
then one true division (for a gradient that is whole on every rank: micro-batches first). Optimizers
are written out here, element by element, from their papers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

__all__ = ["Adamw", "Oracle", "Result", "Sgd", "sum_over_ranks"]


@dataclasses.dataclass(frozen=True)
class Sgd:
    """p = p - lr * g."""

    lr: float | Callable[[int], float]

    def start(self, param: Tensor) -> dict[str, Any]:
        return {"count": 0}

    def apply(self, param: Tensor, grad: Tensor, memory: dict[str, Any], decays: bool) -> Tensor:
        lr = _rate(self.lr, memory["count"])
        memory["count"] += 1
        return param - lr * grad


@dataclasses.dataclass(frozen=True)
class Adamw:
    """Adam with decoupled decay (Loshchilov and Hutter 2019, algorithm 2), eps after the root.

    A complex number is two real ones. As in torch the second moment is corrected after the root.
    """

    lr: float | Callable[[int], float]
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def start(self, param: Tensor) -> dict[str, Any]:
        zeros = torch.zeros_like(torch.view_as_real(param) if param.is_complex() else param)
        return {"count": 0, "m": zeros, "v": zeros}

    def apply(self, param: Tensor, grad: Tensor, memory: dict[str, Any], decays: bool) -> Tensor:
        if param.is_complex():
            pairs = torch.view_as_real(param), torch.view_as_real(grad)
            return torch.view_as_complex(self.apply(*pairs, memory, decays))
        lr = _rate(self.lr, memory["count"])
        memory["count"] += 1
        t = memory["count"]
        memory["m"] = self.b1 * memory["m"] + (1 - self.b1) * grad
        memory["v"] = self.b2 * memory["v"] + (1 - self.b2) * grad * grad
        m = memory["m"] / (1 - self.b1**t)
        root = memory["v"].sqrt() / math.sqrt(1 - self.b2**t)
        direction = m / (root + self.eps)
        return param - lr * (direction + (self.weight_decay if decays else 0.0) * param)


@dataclasses.dataclass(frozen=True)
class Result:
    """What one step gave.

    Attributes:
        loss: the global mean.
        norm: the norm of the mean gradient.
        clipped: the norm after the clip.
        skipped: whether the step was left out.
        grads: the mean gradient of every tensor leaf, None where it does not train.
        aux: what the loss returned besides, by rank and micro-batch.
    """

    loss: float
    norm: float
    clipped: float
    skipped: bool
    grads: list[Tensor | None]
    aux: list[list[Any]]


class Oracle:
    """A dense training run.

    Attributes:
        params: the parameters now; replaced, never written.
        whole_grads: per tensor leaf, whether micro-batches are summed before ranks.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        tx: Sgd | Adamw | None = None,
        *,
        axes: Mapping[str, int],
        whole_grads: bool | Sequence[bool] = False,
        trainable: Sequence[bool] | None = None,
        decays: Sequence[bool] | None = None,
        has_aux: bool = False,
        clip: float | None = None,
        ignore_nonfinite: bool = False,
    ):
        """Starts a run.

        Args:
            loss_fn: the loss, as the sharded step gets it.
            params: the parameters.
            tx: the optimizer.
            axes: the axes of the mesh, in order.
            whole_grads: which gradients are whole on every rank, so summed over micro-batches
                first: all or none, or one entry per tensor leaf.
            trainable: per tensor leaf in canonical order; None for all.
            decays: per tensor leaf, whether its weights decay; None for all.
            has_aux: whether the loss returns `(loss, aux)`.
            clip: the largest global norm.
            ignore_nonfinite: whether to apply what is not finite.
        """
        leaves, self._structure = optree.tree_flatten(params, namespace="zfunc")
        self._statics = [None if isinstance(x, Tensor) else x for x in leaves]
        self._leaves = [x.detach().clone() for x in leaves if isinstance(x, Tensor)]
        marked = trainable or [True] * len(self._leaves)
        self.trainable = [
            on and _is_continuous(x) for on, x in zip(marked, self._leaves, strict=True)
        ]
        self._decays = decays or [True] * len(self._leaves)
        self._memory = [tx.start(x) if tx else {} for x in self._leaves]
        self._loss_fn, self._tx, self._axes = loss_fn, tx, axes
        self._has_aux, self._clip, self._ignore = has_aux, clip, ignore_nonfinite
        same = isinstance(whole_grads, bool)
        self.whole_grads = [whole_grads] * len(self._leaves) if same else list(whole_grads)

    @property
    def params(self) -> Any:
        return self._rebuild(self._leaves)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor leaves, in canonical order."""
        return list(self._leaves)

    def resume(self, tensors: Sequence[Tensor]) -> None:
        """Goes on from other leaves, with the optimizer's memory as it is."""
        self._leaves = [x.clone() for x in tensors]

    @property
    def counts(self) -> list[int]:
        """How many updates each trainable leaf has had."""
        memories = zip(self._memory, self.trainable, strict=True)
        return [memory["count"] for memory, on in memories if on]

    def value_and_grad(
        self, batches: Sequence[Sequence[Any]], keys: Sequence[Sequence[Any]] | None = None
    ) -> Result:
        """The mean loss and gradient over `batches[rank][micro]`, without an update."""
        runs = [
            [
                self._one(batch, None if keys is None else keys[rank][micro])
                for micro, batch in enumerate(row)
            ]
            for rank, row in enumerate(batches)
        ]
        weights = [sum(run.weight for run in row) for row in runs]
        divisor = sum(weights)
        total = sum(sum(float(run.loss) for run in row) for row in runs)
        grads: list[Tensor | None] = []
        for index, on in enumerate(self.trainable):
            if not on:
                grads.append(None)
                continue
            table = [[run.grads[index] for run in row] for row in runs]
            total_grad = self._sum(table, whole=self.whole_grads[index])
            grads.append(total_grad / divisor if divisor else None)
        loss = total / divisor if divisor else math.nan
        present = [grad for grad in grads if grad is not None]
        norm = math.sqrt(sum(float((g.abs().double() ** 2).sum()) for g in present))
        finite = math.isfinite(loss) and all(bool(torch.isfinite(g).all()) for g in present)
        skipped = divisor == 0 or not (finite or self._ignore)
        factor = self._clip / norm if self._clip is not None and norm > self._clip else 1.0
        aux = [[run.aux for run in row] for row in runs]
        return Result(loss, norm, norm * factor, skipped, grads, aux)

    def step(
        self, batches: Sequence[Sequence[Any]], keys: Sequence[Sequence[Any]] | None = None
    ) -> Result:
        """One training step on `batches[rank][micro]`."""
        result = self.value_and_grad(batches, keys)
        if result.skipped:
            return result
        assert self._tx is not None
        factor = result.clipped / result.norm if result.clipped != result.norm else None
        for index, grad in enumerate(result.grads):
            if grad is None:
                continue
            if factor is not None:
                grad = grad * factor
            self._leaves[index] = self._tx.apply(
                self._leaves[index], grad, self._memory[index], self._decays[index]
            )
        return result

    def _one(self, batch: Any, key: Any) -> _Run:
        """One rank's run of one micro-batch."""
        leaves = [
            x.clone().requires_grad_() if on else x
            for x, on in zip(self._leaves, self.trainable, strict=True)
        ]
        args = self._rebuild(leaves), batch
        out = self._loss_fn(*args) if key is None else self._loss_fn(*args, key=key)
        out, aux = out if self._has_aux else (out, None)
        loss, weight = out if isinstance(out, tuple) else (out, 1.0)
        if loss.requires_grad:
            loss.backward()
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        aux = optree.tree_map(_detached, aux, namespace="zfunc")
        return _Run(loss.detach(), float(weight), grads, aux)

    def _sum(self, table: list[list[Tensor]], *, whole: bool) -> Tensor:
        """Sums `table[rank][micro]` in the promised order."""
        sizes = tuple(self._axes.values())
        if whole:
            return sum_over_ranks([functools.reduce(torch.add, row) for row in table], sizes)
        columns = [sum_over_ranks(column, sizes) for column in zip(*table, strict=True)]
        return functools.reduce(torch.add, columns)

    def _rebuild(self, tensors: Sequence[Tensor]) -> Any:
        remaining = iter(tensors)
        filled = [next(remaining) if static is None else static for static in self._statics]
        return optree.tree_unflatten(self._structure, filled)


def sum_over_ranks(terms: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Adds one tensor per rank: along the last axis first, each group in rank order."""
    for size in reversed(sizes):
        groups = [terms[start : start + size] for start in range(0, len(terms), size)]
        terms = [functools.reduce(torch.add, group) for group in groups]
    (total,) = terms
    return total


@dataclasses.dataclass(frozen=True)
class _Run:
    loss: Tensor
    weight: float
    grads: list[Tensor]
    aux: Any


def _is_continuous(x: Tensor) -> bool:
    return x.is_complex() or (x.is_floating_point() and x.element_size() > 1)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _rate(lr: float | Callable[[int], float], count: int) -> float:
    return lr(count) if callable(lr) else lr
