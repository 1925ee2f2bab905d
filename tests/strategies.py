"""What hypothesis draws: trees of every kind of leaf, losses over any such tree, meshes, plans.

A loss is a recipe, a list of instructions (`tests.instructions`) that any tree can follow. Data are
small integers, so that values stay exact and equality may be asked bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.harness import integers
from zfunc import tree

__all__ = ["Pair", "Recipe", "Run", "batch_rows", "recipes", "runs", "trees"]

WIDTH = 4


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
    """A tensor leaf to be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype


_SPECS = st.builds(Spec, SHAPES, st.sampled_from(DTYPES + FROZEN))
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
    """A tree of parameters with at least one leaf that trains."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    specs = {"main": Spec((3, 5), torch.float64), "rest": draw(_NODES)}
    return tree.map(
        lambda leaf: (
            integers(generator, leaf.shape, leaf.dtype) if isinstance(leaf, Spec) else leaf
        ),
        specs,
    )


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
        leaves = [x for x in tree.leaves(params) if isinstance(x, Tensor)]
        h = batch["x"].sum(0)
        for name, i, j in self.steps:
            one, other = leaves[i % len(leaves)], leaves[j % len(leaves)]
            h = INSTRUCTIONS[name](h, one, other, batch).clamp(-8, 8)
        loss: Any = (h * h).sum()
        if self.weighted:
            loss = loss, batch["weight"]
        return (loss, {"h": h, "name": "aux"}) if self.has_aux else loss


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


def _tied(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    size = min(a.numel(), b.numel(), 5)
    return h + (vector(a)[:size] * vector(b)[:size]).sum()


def _in_place(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    out = h * 1
    out.add_(padded(a))
    out[0] += 1
    out[1:3].mul_(2)
    out.relu_()
    return out + padded(b)


def _embedding(h: Tensor, a: Tensor, _: Tensor, batch: Any) -> Tensor:
    return h + F.embedding(batch["index"], padded(a).reshape(-1, 1)).reshape(-1)


def _rematerialised(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    @zfunc.remat
    def block(h: Tensor) -> Tensor:
        return torch.relu(square(a) @ h).clamp(-8, 8) * (1 + padded(b))

    return block(block(h).clamp(-8, 8))


def _looks(h: Tensor, a: Tensor, b: Tensor, _: Any) -> Tensor:
    return h + padded(a) if float(h.detach().sum()) > 0 else h - padded(b)


def _complex_norm(h: Tensor, a: Tensor, _: Tensor, __: Any) -> Tensor:
    return h + (a * a.conj()).real.sum().double() if a.is_complex() else h + vector(a).sum()


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
    "branch": lambda h, a, b, _: -h if a.dim() % 2 else h + padded(b),
    "frozen here": lambda h, a, b, _: h + padded(a.detach()) * padded(b),
    "batch": lambda h, a, b, batch: h + batch["x"].sum() * padded(a),
    "in place": _in_place,
    "embedding": _embedding,
    "remat": _rematerialised,
    "complex": _complex_norm,
    "looks at a value": _looks,
}

recipes = st.builds(
    Recipe,
    st.lists(
        st.tuples(st.sampled_from(sorted(INSTRUCTIONS)), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    ).map(tuple),
    weighted=st.sampled_from([False, False, True]),
    has_aux=st.booleans(),
)


def batch_rows(rows: int, seed: int) -> dict[str, Tensor]:
    """One micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": integers(generator, (rows, WIDTH)),
        "index": torch.randint(0, WIDTH, (WIDTH,), generator=generator),
        "weight": torch.randint(0, 3, (), generator=generator).double(),
    }


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
        remat: whether the whole loss is recomputed.
        donate: whether a step writes into its state.
    """

    axes: Mapping[str, int]
    specs: Any
    rows: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    budget: float = 1.0
    bucket_bytes: int = 1 << 20
    ahead_bytes: int | None = None
    remat: bool = False
    donate: bool = True

    @property
    def world(self) -> int:
        """The number of ranks."""
        size = 1
        for ranks in self.axes.values():
            size *= ranks
        return size

    def trainable(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Which tensor leaves train."""
        chosen = {i % len(tensors) for i in self.frozen}
        return [i not in chosen for i in range(len(tensors))]


SPECS = [
    zfunc.zero(1),
    zfunc.zero(2),
    zfunc.zero(3),
    zfunc.zero(3),
    {"main": zfunc.P(), "rest": zfunc.Flat()},
    zfunc.Flat(min_numel=6),
    zfunc.P(),
]

runs = st.builds(
    Run,
    axes=st.sampled_from(
        [{"shard": 2}] * 5
        + [{"shard": 1}, {"shard": 3}, {"replica": 1, "shard": 2}]
        + [{"replica": 2, "shard": 2}, {"shard": 2, "replica": 2}]
    ),
    specs=st.sampled_from(SPECS),
    rows=st.sampled_from([(3,), (2,), (0,), (2, 3), (1, 1), (2, 0, 1)]),
    frozen=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    budget=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    bucket_bytes=st.sampled_from([0, 100, 1 << 20]),
    ahead_bytes=st.sampled_from([None, 0, 150]),
    remat=st.booleans(),
    donate=st.booleans(),
)
