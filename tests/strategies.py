"""What hypothesis draws: trees of every kind of leaf, losses over any such tree, meshes, plans.

A loss is a recipe, a list of instructions (`tests.instructions`) that any tree can follow. Data are
small integers, so that values stay exact and equality may be asked bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.harness import integers
from tests.instructions import INSTRUCTIONS, WIDTH
from zfunc import tree

__all__ = [
    "Pair",
    "Recipe",
    "Run",
    "batch_rows",
    "batches",
    "recipes",
    "recipes_up_to",
    "runs",
    "tensors_of",
    "trees",
]


class Pair(NamedTuple):
    """A node of a tree."""

    left: Any
    right: Any


DTYPES = [torch.float64] * 6 + [torch.float32, torch.bfloat16, torch.float16, torch.complex128]
FROZEN = [torch.int64, torch.bool, torch.uint8]
STATICS = st.sampled_from([None, 3, 2.5, "relu", torch.relu])
SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 11])
SHAPES = st.one_of(
    st.just(()), st.tuples(SIZES), st.tuples(SIZES, SIZES), st.tuples(SIZES, st.just(2), SIZES)
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A tensor leaf to be made.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        form: how it lies in memory: one of `FORMS`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    form: str = "dense"

    def make(self, generator: torch.Generator) -> Tensor:
        """Small integers."""
        if self.form == "transposed":
            dims = tuple(reversed(range(len(self.shape))))
            return integers(generator, self.shape[::-1], self.dtype).permute(dims)
        if self.form == "expanded" and self.shape:
            return integers(generator, self.shape[1:], self.dtype).expand(self.shape)
        if self.form == "view":
            numel = math.prod(self.shape)
            return integers(generator, (numel + 3,), self.dtype)[2 : 2 + numel].view(self.shape)
        return integers(generator, self.shape, self.dtype)


FORMS = ["dense"] * 6 + ["transposed", "expanded", "view"]

_SPECS = st.builds(Spec, SHAPES, st.sampled_from(DTYPES + FROZEN), st.sampled_from(FORMS))
_NODES = st.recursive(
    st.one_of(_SPECS, _SPECS, _SPECS, STATICS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["a", "b", "z"]), inner, max_size=3),
        st.dictionaries(st.integers(0, 20), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=7,
)


@st.composite
def trees(draw: Any) -> Any:
    """A tree of parameters with at least one leaf that trains, perhaps with one tensor twice."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    specs = {"main": Spec((3, 5), torch.float64), "rest": draw(_NODES)}
    made = tree.map(lambda x: x.make(generator) if isinstance(x, Spec) else x, specs)
    if draw(st.sampled_from([False, False, False, True])):
        made["rest"] = [made["rest"], made["main"]]
    return made


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A loss that any tree of parameters can follow.

    Attributes:
        steps: `(instruction, leaf, other leaf)`; leaves count modulo those that there are.
        weighted: whether it returns `(sum, weight)`.
        has_aux: whether it returns a tree besides.
    """

    steps: tuple[tuple[str, int, int], ...]
    weighted: bool = False
    has_aux: bool = False

    def __call__(self, params: Any, batch: Any) -> Any:
        leaves = tensors_of(params)
        h = batch["x"].sum(0)
        for name, i, j in self.steps:
            one, other = leaves[i % len(leaves)], leaves[j % len(leaves)]
            h = zfunc.name(INSTRUCTIONS[name](h, one, other, batch).clamp(-8, 8), name)
        loss: Any = (h * h).sum()
        if self.weighted:
            loss = loss, batch["weight"]
        return (loss, {"h": h, "name": "aux"}) if self.has_aux else loss

    def has(self, instruction: str) -> bool:
        """Whether an instruction is among its steps."""
        return any(name == instruction for name, _, _ in self.steps)


def recipes_up_to(length: int) -> st.SearchStrategy[Recipe]:
    """Losses of so many instructions."""
    step = st.tuples(st.sampled_from(sorted(INSTRUCTIONS)), st.integers(0, 9), st.integers(0, 9))
    return st.builds(
        Recipe,
        st.lists(step, min_size=1, max_size=length).map(tuple),
        weighted=st.sampled_from([False, False, True]),
        has_aux=st.booleans(),
    )


recipes = recipes_up_to(4)


def batch_rows(rows: int, seed: int, step: int = 0) -> dict[str, Any]:
    """One micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": integers(generator, (rows, WIDTH)),
        "index": torch.randint(0, WIDTH, (WIDTH,), generator=generator),
        "weight": torch.randint(0, 3, (), generator=generator).double(),
        "step": step,
    }


def batches(run: Run, step: int, *, branches: bool = False) -> list[list[Any]]:
    """`[rank][micro]`; the number of rows differs between micro-batches and between ranks.

    Args:
        run: how the step is run.
        step: which step's.
        branches: whether losses may branch on the number of the step.
    """
    return [
        [
            batch_rows((rows + rank) % 4, 1000 * step + 10 * rank + micro, step if branches else 0)
            for micro, rows in enumerate(run.rows)
        ]
        for rank in range(run.world)
    ]


@dataclasses.dataclass(frozen=True)
class Run:
    """How a step is run.

    Attributes:
        axes: the axes of the mesh.
        specs: what `shard` takes.
        rows: per micro-batch, how many rows it has.
        frozen: which tensor leaves do not train, modulo their number.
        budget: 0 for the smallest feasible budget of live bytes, 1 for an ample one.
        bucket_bytes: the largest bucket.
        ahead_bytes: what may be gathered ahead.
        remat: what is kept of the whole loss; None where nothing is recomputed.
        donate: whether a step writes into its state.
    """

    axes: Mapping[str, int]
    specs: Any
    rows: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    budget: float = 1.0
    bucket_bytes: int = 1 << 20
    ahead_bytes: int | None = None
    remat: Any = None
    donate: bool = True

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    def trainable(self, params: Any) -> list[bool]:
        """Which tensor leaves train."""
        count = len(tensors_of(params))
        chosen = {i % count for i in self.frozen}
        return [i not in chosen for i in range(count)]

    def trainable_tree(self, params: Any) -> Any:
        """The same as a tree; what is no tensor is True."""
        leaves, structure = tree.flatten(params)
        flags = iter(self.trainable(params))
        return tree.unflatten(structure, [not isinstance(x, Tensor) or next(flags) for x in leaves])

    def whole_grads(self, params: Any) -> list[bool]:
        """Which tensor leaves have gradients that are whole on every rank, worked out by hand."""
        by_class = isinstance(self.specs, Mapping) and "params" in self.specs
        specs = self.specs.get("grads", self.specs["params"]) if by_class else self.specs
        each = specs if isinstance(specs, Mapping) else {"main": specs, "rest": specs}
        return [
            isinstance(spec, zfunc.P) or x.numel() < spec.min_numel
            for i, x in enumerate(tensors_of(params))
            for spec in [each["rest" if i else "main"]]
        ]

    def options(self, params: Any) -> dict[str, Any]:
        """What `shard` takes."""
        return {
            "specs": self.specs,
            "trainable": self.trainable_tree(params),
            "remat": self.remat,
            "accum": len(self.rows),
            "donate": self.donate,
        }


def tensors_of(params: Any) -> list[Tensor]:
    """The tensor leaves of a tree, in canonical order."""
    return [x for x in tree.leaves(params) if isinstance(x, Tensor)]


REMATS = [
    *[None, zfunc.policies.nothing] * 2,
    *[zfunc.policies.matmuls, zfunc.policies.names("add", "matmul", "views")],
    *[zfunc.policies.budget(40), zfunc.policies.budget(1_000_000)],
]

AXES: list[dict[str, int]] = [
    *[{"shard": 2}] * 6,
    *[{"shard": 1}, {"shard": 3}, {"shard": 4}],
    *[{"replica": 2, "shard": 2}, {"shard": 2, "replica": 2}],
    *[{"replica": 1, "shard": 2}, {"replica": 2, "shard": 1}],
]


def specs_over(axis: str) -> st.SearchStrategy[Any]:
    """Specs of every form over one axis; params nest in grads, grads in optimizer state."""
    flat = st.builds(zfunc.Flat, st.just(axis), st.sampled_from([0, 0, 6]))
    one = st.one_of(flat, st.just(zfunc.P()))
    cut = zfunc.Flat(axis)
    return st.one_of(
        st.sampled_from([1, 2, 3, 3]).map(lambda stage: zfunc.zero(stage, axis)),
        one,
        st.fixed_dictionaries({"main": one, "rest": one}),
        st.fixed_dictionaries({"params": one, "grads": st.just(cut), "opt": st.just(cut)}),
        st.just({"params": zfunc.P(), "opt": cut}),
        st.just({"params": zfunc.Flat(axis, 6), "grads": zfunc.Flat(axis, 3), "opt": cut}),
        st.just({"params": {"main": cut, "rest": zfunc.P()}, "grads": cut, "opt": cut}),
    )


@st.composite
def _runs(draw: Any) -> Run:
    axes = draw(st.sampled_from(AXES))
    return Run(
        axes=axes,
        specs=draw(st.sampled_from(sorted(axes)).flatmap(specs_over)),
        rows=draw(st.sampled_from([(3,), (3,), (2,), (0,), (2, 3), (1, 1), (2, 2, 1)])),
        frozen=tuple(draw(st.lists(st.integers(0, 9), max_size=2))),
        budget=draw(st.sampled_from([0.0, 0.2, 0.6, 1.0])),
        bucket_bytes=draw(st.sampled_from([0, 100, 1 << 20])),
        ahead_bytes=draw(st.sampled_from([None, 0, 150])),
        remat=draw(st.sampled_from(REMATS)),
        donate=draw(st.booleans()),
    )


runs = _runs()
