"""Layouts: how a leaf of some shape is cut over the axes of a mesh.

A spec says it in a word (`Flat`: ravel and cut evenly; `P()`: whole on every rank); a `Layout`
binds a spec to the shape of one leaf and to a mesh. `zero(stage)` names the ZeRO stages: they
differ only in which of parameters, gradients and optimizer state are cut (Rajbhandari et al. 2020,
"ZeRO", section 5).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zfunc.errors import LayoutError, explain
from zfunc.meshes import Mesh, shard_range
from zfunc.tree import broadcast_prefix

__all__ = [
    "DEVICE",
    "Dtypes",
    "Flat",
    "Kind",
    "Layout",
    "LeafLayouts",
    "P",
    "ShapeDtype",
    "Spec",
    "layouts_of",
    "zero",
]

_CLASSES = ("params", "grads", "opt", "acts")


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    """Ravel a leaf and cut it into equal slices along one axis of the mesh (the layout of ZeRO-3).

    Attributes:
        axis: the axis of the mesh.
        min_numel: leaves with fewer elements stay whole on every rank.

    Example:
        >>> Flat(min_numel=1024)
        Flat(axis='shard', min_numel=1024)
    """

    axis: str = "shard"
    min_numel: int = 0


class P:
    """Names the axis that cuts each dim of a leaf; `P()` keeps the leaf whole on every rank.

    It is a class of its own, not a tuple, so that it is a leaf of a tree of specs.

    Example:
        >>> P()
        P()
    """

    __slots__ = ("axes",)

    def __init__(self, *axes: str | None):
        self.axes = axes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.axes == other.axes

    def __hash__(self) -> int:
        return hash(("P", self.axes))

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.axes))})"


Spec = Flat | P


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A memory tier."""

    name: str

    def __repr__(self) -> str:
        return self.name


DEVICE = Kind("DEVICE")


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeDtype:
    """The shape and dtype of a tensor that need not exist.

    Example:
        >>> ShapeDtype((2, 3), torch.float32).nbytes
        24
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor of this shape and dtype."""
        return self.numel * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A leaf of a global shape, cut by a spec over a mesh.

    Attributes:
        shape: the shape of the whole leaf.
        spec: how it is cut.
        mesh: over what; compared by axes, sizes and processes.
        path: the leaf's path, for messages; not compared.
    """

    shape: tuple[int, ...]
    spec: Spec
    mesh: Mesh
    path: str = dataclasses.field(default="", compare=False)

    @property
    def numel(self) -> int:
        """Elements of the whole leaf."""
        return math.prod(self.shape)

    @property
    def axis(self) -> str | None:
        """The axis that cuts the leaf, or None where it is whole."""
        return self.spec.axis if isinstance(self.spec, Flat) else None

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole leaf."""
        return self.axis is None or self.mesh.axis_size(self.axis) == 1

    @property
    def range(self) -> tuple[int, int]:
        """The half-open range of raveled elements that this rank holds."""
        if self.axis is None:
            return 0, self.numel
        return shard_range(self.numel, self.mesh.axis_size(self.axis), self.mesh.index(self.axis))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        if self.axis is None:
            return self.shape
        start, stop = self.range
        return (stop - start,)


@dataclasses.dataclass(frozen=True, slots=True)
class LeafLayouts:
    """The layouts of one parameter leaf, its gradient and its optimizer state."""

    params: Layout
    grads: Layout
    opt: Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Dtypes:
    """What `Precision` comes to for one leaf.

    Attributes:
        stored: the dtype of the piece in the state.
        compute: the dtype that the function sees.
        reduce: the dtype of its reduced gradient; None for that of the gradient.
        master: whether the optimizer's state holds a float32 master.
        rounding: "nearest" or "stochastic": an update is computed in float32, and rounded so; ""
            for one in the dtype of the leaf.
    """

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype | None = None
    master: bool = False
    rounding: str = ""

    @staticmethod
    def plain(dtype: torch.dtype) -> Dtypes:
        """One dtype for everything."""
        return Dtypes(dtype, dtype)


def zero(stage: int, axis: str = "shard") -> Mapping[str, Spec]:
    """The specs of a ZeRO stage.

    Args:
        stage: 1 cuts optimizer state, 2 also gradients, 3 also parameters.
        axis: the axis that cuts.

    Returns:
        A mapping by class, as `shard(specs=)` takes it.

    Raises:
        LayoutError: any other stage.

    Example:
        >>> zero(2)["params"], zero(2)["grads"]
        (P(), Flat(axis='shard', min_numel=0))
    """
    if stage not in (1, 2, 3):
        raise LayoutError(
            explain(
                f"zero({stage!r}) is not a stage", expected="1, 2 or 3", do="see ZeRO, section 5"
            )
        )
    flat = Flat(axis)
    return {
        "params": flat if stage >= 3 else P(),
        "grads": flat if stage >= 2 else P(),
        "opt": flat,
    }


def layouts_of(
    specs: Any, tree: Any, shapes: Sequence[tuple[int, ...]], paths: Sequence[str], mesh: Mesh
) -> list[LeafLayouts]:
    """Resolves `shard(specs=)` for every leaf of a parameter tree.

    Args:
        specs: a prefix tree of specs, or a mapping by class whose values are prefix trees.
        tree: the parameter tree, without `Sharded` nodes.
        shapes: the global shape of each leaf, in canonical order.
        paths: the path of each leaf.
        mesh: the mesh.

    Returns:
        The layouts of each leaf.

    Raises:
        LayoutError: a spec names a missing axis, or the three classes do not fit together.
        TreeMismatchError: a spec tree is not a prefix of the parameter tree.
    """
    if not (isinstance(specs, Mapping) and specs and set(specs) <= set(_CLASSES)):
        specs = {"params": specs}
    if "params" not in specs:
        raise LayoutError(
            explain(
                "specs by class lack 'params'",
                expected="a spec for 'params'; 'grads' and 'opt' follow it when missing",
                got=sorted(specs),
                do="add 'params', or use zero(1), zero(2), zero(3)",
            )
        )
    columns = [
        _column(specs.get(name, specs["params"]), tree, shapes, paths, mesh, f"specs[{name!r}]")
        for name in ("params", "grads", "opt")
    ]
    rows = [LeafLayouts(*row) for row in zip(*columns, strict=True)]
    for row in rows:
        _check_nesting(row)
    return rows


def _column(
    prefix: Any,
    tree: Any,
    shapes: Sequence[tuple[int, ...]],
    paths: Sequence[str],
    mesh: Mesh,
    name: str,
) -> list[Layout]:
    """The layouts of one class."""
    column = []
    for spec, shape, path in zip(
        broadcast_prefix(prefix, tree, name=name), shapes, paths, strict=True
    ):
        _check_spec(spec, shape, path, mesh, name)
        if isinstance(spec, Flat) and math.prod(shape) < spec.min_numel:
            spec = P()
        column.append(Layout(tuple(shape), spec, mesh, path))
    return column


def _check_spec(spec: Any, shape: tuple[int, ...], path: str, mesh: Mesh, name: str) -> None:
    """Raises `LayoutError` for what is not a spec over this mesh."""
    if isinstance(spec, P) and not any(spec.axes):
        return
    if not isinstance(spec, Flat):
        raise LayoutError(
            explain(
                f"{name} has {spec!r} for {path}",
                expected="Flat(axis) or P()",
                got=f"{path}: {list(shape)}",
                do="cut the leaf with Flat, or keep it whole with P()",
            )
        )
    if spec.axis not in mesh.axes:
        near = difflib.get_close_matches(spec.axis, mesh.axes, n=1)
        raise LayoutError(
            explain(
                f"{name} = {spec!r} names an axis that the mesh does not have",
                expected=f"one of {tuple(mesh.axes)}",
                got=f"{spec.axis!r} for {path}: {list(shape)}",
                do=f"did you mean {near[0]!r}?" if near else "name one of the mesh's axes",
            )
        )


def _check_nesting(row: LeafLayouts) -> None:
    """Optimizer state is cut wherever gradients are, and gradients wherever parameters are."""
    axes = [layout.axis for layout in (row.params, row.grads, row.opt)]
    cut = [axis for axis in axes if axis is not None]
    if len(set(cut)) > 1 or axes != [None] * (3 - len(cut)) + cut:
        raise LayoutError(
            explain(
                f"specs of {row.params.path} do not nest",
                expected="what cuts params also cuts grads, what cuts grads also cuts opt",
                got=f"params {row.params.spec}, grads {row.grads.spec}, opt {row.opt.spec}",
                do="use zero(1), zero(2), zero(3), or one spec for all three",
            )
        )
