"""A case: one kind of tree, loss or batch that breaks other systems, and its right value.

A case is written as a loss under a decorator. `perform` trains it on one rank of any mesh;
`expected` trains it densely, by plain autograd in one process, in the order of sums that the
library promises. What both saw must be equal: bit for bit where the data are integers, else within
a bound.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import zfunc
from tests.harness import Plan, assert_equal, gathered, planned
from tests.oracle import Oracle, Result, Sgd
from zfunc import optim, tree

__all__ = ["RATE", "Case", "Seen", "case", "cases_of", "compare", "expected", "ints", "perform"]

RATE = 2.0**-6


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of hostile input.

    Attributes:
        loss: `loss(params, batch)`, perhaps with `key`.
        params: rank -> that rank's copy of the tree.
        batch: (rank, step) -> that rank's batch; with `accum` a list of micro-batches.
        dense: the loss that the oracle runs, where it is not `loss` itself.
        before: called with the batch before each call of the step.
        keys: (rank, step, micro) -> the key that the loss must get, for one that takes a key.
        rung: what `explain` must say of the last signature: rung and derivation.
        worlds: the sizes of the meshes of virtual ranks; 4 is 2 x 2.
        checked: whether programs may go to the checker after every pass.
        steps: how many training steps are compared.
        tol: 0 for equality of bits, else the bound relative to the largest value.
        tx: the optimizer and the oracle's own.
        train: per tensor leaf whether it trains, for the oracle.
        options: further options of `shard`.
        oracle: further options of the oracle.
    """

    loss: Callable[..., Any]
    params: Callable[[int], Any]
    batch: Callable[[int, int], Any]
    dense: Callable[..., Any] | None = None
    before: Callable[[Any], None] = lambda batch: None
    keys: Callable[[int, int, int], Tensor] | None = None
    rung: str = "traced vjp"
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    steps: int = 2
    checked: bool = True
    tol: float = 0.0
    tx: tuple[Any, Any] = (optim.sgd(RATE), Sgd(RATE))
    train: list[bool] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    oracle: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def accum(self) -> int:
        """Micro-batches per step."""
        return self.options.get("accum", 1)

    @property
    def has_aux(self) -> bool:
        """Whether the loss returns aux."""
        return self.options.get("has_aux", False)


@dataclasses.dataclass
class Seen:
    """What one rank saw.

    Attributes:
        value: the loss before the first step, if that was asked for.
        grads: its whole gradients, in canonical order, likewise.
        steps: per step its loss, norm, whether it was skipped, aux, and the leaves after it.
        rung: rung and derivation of the program used last.
    """

    value: Tensor | None
    grads: list[Tensor]
    steps: list[tuple[Tensor, float, bool, Any, list[Tensor]]]
    rung: str


def case(
    params: Callable[[int], Any], batch: Callable[[int, int], Any], **settings: Any
) -> Callable[[Callable[..., Any]], Case]:
    """Makes a `Case` of the loss below it."""
    return lambda loss: Case(loss, params, batch, **settings)


def cases_of(module: ModuleType) -> dict[str, Case]:
    """The cases of a module, by name."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Case)}


def perform(mesh: zfunc.Mesh, module: str, name: str, plan: Plan | None = None) -> Seen:
    """Trains a case on one rank; on two ranks it also looks at gradients and traces again."""
    this: Case = getattr(importlib.import_module(module), name)
    thorough = mesh.size == 2
    capture = zfunc.Capture("auto", check_every=int(thorough))
    step = zfunc.shard(this.loss, mesh, **({"capture": capture} | dict(this.options)))
    if plan is not None:
        step = planned(step, plan)
    key = None if this.keys is None else zfunc.random.key(0)
    state = step.init(this.params(mesh.rank), this.tx[0], key=key)
    seen = Seen(None, [], [], "")
    if thorough:
        batch = this.batch(mesh.rank, 0)
        this.before(batch)
        value, grads = step.value_and_grad(state.params, batch, key=state.key)
        seen.value = value[0] if this.has_aux else value
        seen.grads = gathered(grads)
    for number in range(this.steps):
        batch = this.batch(mesh.rank, number)
        this.before(batch)
        state, m = step(state, batch)
        numbers = m["loss"], float(m["grad_norm_clipped"]), bool(m["skipped"])
        seen.steps.append((*numbers, m.get("aux"), gathered(state.params)))
    last = step.explain().signatures[-1]
    seen.rung = f"{last.rung} {last.derivation}"
    return seen


def expected(
    this: Case, axes: Mapping[str, int]
) -> tuple[Result, list[Result], list[list[Tensor]]]:
    """Trains a case densely: the first gradient, and result and leaves of every step."""
    loss, world = this.dense or this.loss, math.prod(axes.values())
    oracle = Oracle(
        loss,
        tree.map(lambda x: x.contiguous() if isinstance(x, Tensor) else x, this.params(0)),
        this.tx[1],
        axes=axes,
        trainable=this.train,
        has_aux=this.has_aux,
        **this.oracle,
    )
    first = oracle.value_and_grad(_batches(this, world, 0), _keys(this, world, 0))
    results, leaves = [], []
    for step in range(this.steps):
        results.append(oracle.step(_batches(this, world, step), _keys(this, world, step)))
        leaves.append(oracle.tensors)
    return first, results, leaves


def _batches(this: Case, world: int, step: int) -> list[list[Any]]:
    """`[rank][micro]`, made anew: some have a history of their own."""
    rows = [this.batch(rank, step) for rank in range(world)]
    return [row if this.accum > 1 else [row] for row in rows]


def _keys(this: Case, world: int, step: int) -> list[list[Tensor]] | None:
    if this.keys is None:
        return None
    return [[this.keys(r, step, micro) for micro in range(this.accum)] for r in range(world)]


def compare(this: Case, seen: list[Seen], axes: Mapping[str, int]) -> None:
    """Asserts that every rank saw what the dense run gives."""
    first, results, leaves = expected(this, axes)
    for rank, one in enumerate(seen):
        assert one.rung == this.rung
        if one.value is not None and not first.skipped:
            _close(one.value, first.loss, this.tol)
            assert_equal(one.grads, [g for g in first.grads if g is not None], this.tol)
        for got, result, after in zip(one.steps, results, leaves, strict=True):
            loss, norm, skipped, aux, tensors = got
            _close(loss, result.loss, this.tol)
            assert skipped == result.skipped
            if not skipped:
                clip = result.clipped / result.norm if result.norm else 1.0
                _close(norm, clip * _norm(result.grads), max(this.tol, 1e-12))
            assert_equal(tensors, after, this.tol)
            if this.has_aux:
                _same_aux(aux if this.accum > 1 else [aux], result.aux[rank], this.tol)


def _close(got: Tensor | float, right: float, tol: float) -> None:
    """A metric has the dtype of what it measures."""
    if isinstance(got, Tensor):
        right = float(torch.tensor(right, dtype=got.dtype))
    got = float(got)
    if math.isfinite(right):
        assert abs(got - right) <= tol * max(1.0, abs(right)), (got, right)
    else:
        assert got == right or (math.isnan(got) and math.isnan(right)), (got, right)


def _norm(grads: list[Tensor | None]) -> float:
    """The global norm in float64, of complex gradients by real and imaginary parts."""
    present = [g.detach() for g in grads if g is not None]
    parts = [torch.view_as_real(g) if g.is_complex() else g for g in present]
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))


def _same_aux(got: Any, right: Any, tol: float) -> None:
    one, structure = tree.flatten(got)
    other, same = tree.flatten(right)
    assert structure == same
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert_equal([a], [b], tol)
        else:
            assert a == b


def ints(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers, exact in any dtype, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)
