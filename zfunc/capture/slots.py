"""Slots: what a captured function is called with, as hashable data.

An argument tree is flattened once; each leaf becomes a slot that says everything a trace depends
on. The tuple of arguments is the signature that keys the capture cache.
"""

from __future__ import annotations

import dataclasses
import decimal
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from zfunc import tree
from zfunc.capture.compat import is_fake
from zfunc.errors import LayoutError, explain
from zfunc.layout import Dtypes, LeafLayouts, ShapeDtype
from zfunc.sharded import Sharded, is_sharded

__all__ = [
    "ArgLeaf",
    "Argument",
    "Input",
    "LeafSlot",
    "Slot",
    "Static",
    "describe",
    "difference",
    "is_like",
    "refuse_shapes",
]


@dataclasses.dataclass(frozen=True, slots=True)
class LeafSlot:
    """A parameter leaf: arrives whole.

    Attributes:
        path: where the user finds it.
        spec: shape and dtype of the whole leaf as it arrives.
        layouts: how it, its gradient and its optimizer state are cut.
        trainable: whether it has a gradient.
        dtypes: in which it is stored, and more.
    """

    path: str
    spec: ShapeDtype
    layouts: LeafLayouts
    trainable: bool
    dtypes: Dtypes


@dataclasses.dataclass(frozen=True, slots=True)
class ArgLeaf:
    """A `Sharded` leaf of another argument: arrives as such, `gather` reads it whole."""

    path: str
    spec: ShapeDtype
    layouts: LeafLayouts
    local_shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A tensor of this rank's batch."""

    spec: ShapeDtype
    stride: tuple[int, ...]
    device: torch.device


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Static:
    """Anything that is not a tensor: part of the signature by type and value.

    Numbers are compared as they are spelled: -0.0 is not 0.0, and NaN is NaN; also inside of a
    frozen set or dataclass.
    """

    kind: type
    value: Any

    def _identity(self) -> Any:
        return _identity(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


Slot = LeafSlot | ArgLeaf | Input | Static
_SPELLED = (float, complex, numpy.generic, decimal.Decimal, range)


def _identity(value: Any) -> Any:
    """What tells a value from others that are equal to it, such as True from 1; hashable."""
    kind = type(value)
    if isinstance(value, _SPELLED):
        return kind, repr(value)
    if isinstance(value, tuple):
        return kind, tuple(map(_identity, value))
    if isinstance(value, frozenset):
        return kind, frozenset(map(_identity, value))
    if kind.__eq__ is not object.__eq__ and dataclasses.is_dataclass(value):
        compared = [field.name for field in dataclasses.fields(value) if field.compare]
        return kind, value, tuple(_identity(getattr(value, name)) for name in compared)
    return kind, value


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One flattened argument: its structure and the slot of each leaf."""

    structure: Any
    slots: tuple[Slot, ...]


def difference(old: Sequence[Argument], new: Sequence[Argument]) -> str:
    """The first leaf in which two signatures differ, for a message."""
    for one, other in zip(old, new, strict=False):
        if one.structure != other.structure:
            return "a batch of another structure"
        paths = one.structure.accessors()
        for path, a, b in zip(paths, one.slots, other.slots, strict=True):
            if a != b:
                return f"{path.codify('batch')}: {_said(a)}, then {_said(b)}"
    return "another number of micro-batches, or other modes of torch"


def _said(slot: Slot) -> str:
    return repr(slot.value) if isinstance(slot, Static) else str(list(slot.spec.shape))


def unfit(leaf: torch.Tensor) -> str:
    """Why a tensor cannot be an operand of a graph; empty if it can."""
    dispatch = type(leaf).__torch_dispatch__  # pyright: ignore
    if leaf.layout != torch.strided:
        return f"a {'sparse' if leaf.is_sparse else leaf.layout} tensor"
    if leaf.is_quantized:
        return f"a quantized tensor ({leaf.dtype})"
    if dispatch is not torch.Tensor.__torch_dispatch__ and not is_fake(leaf):  # pyright: ignore
        return f"a {type(leaf).__name__}, which runs operators of its own"
    return ""


def holds_tensors(leaf: Any) -> bool:
    """Whether a leaf that is no tensor has tensors inside."""
    if isinstance(leaf, torch.nn.Module):
        return any(True for _ in (*leaf.parameters(), *leaf.buffers()))
    if not dataclasses.is_dataclass(leaf):
        return False
    return any(isinstance(getattr(leaf, f.name), torch.Tensor) for f in dataclasses.fields(leaf))


def is_like(leaf: Any) -> bool:
    """Whether a leaf has a shape and dtype: a tensor, or a `ShapeDtype` in its place."""
    return isinstance(leaf, torch.Tensor | ShapeDtype)


def refuse_shapes(found: Sequence[Any], **given: Any) -> None:
    """Raises `LayoutError` if what a call would compute with has shapes, but no values.

    Args:
        found: the tensors of the call.
        given: where they come from, by name, to say which one it is.
    """
    if not any(type(leaf) is ShapeDtype for leaf in found):
        return
    for root, value in given.items():
        for path, leaf in zip(tree.leaf_paths(value, root), tree.leaves(value), strict=True):
            if isinstance(leaf, ShapeDtype):
                raise LayoutError(
                    explain(
                        f"{path} has a shape and no values",
                        expected="a tensor",
                        got=leaf,
                        do="lower() looks at shapes; a call computes",
                    )
                )


def describe(
    value: Any, root: str, device: torch.device, *, static: bool = True
) -> tuple[Argument, list[Any]]:
    """Flattens an argument that is not the parameters.

    Args:
        value: any tree of tensors, `ShapeDtype`, `Sharded` and Python values.
        root: what paths start with, such as "batch".
        device: where its tensors must be.
        static: whether leaves that are no tensors must be hashable, to be part of a signature.

    Returns:
        The description, and per slot that is a tensor or `Sharded`, the leaf itself.

    Raises:
        LayoutError: a tensor on another device, or a leaf that cannot be part of a signature.
    """
    leaves, structure = tree.flatten(value, is_leaf=is_sharded)
    slots: list[Slot] = []
    tensors: list[Any] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and static:
            problem = unfit(leaf)
            if problem:
                raise LayoutError(
                    explain(
                        f"{_path(value, root, index)} is {problem}",
                        expected="a plain strided tensor",
                        do="pass the plain tensors that it is made of",
                    )
                )
            # A graph reads what is there: no autograd history, no lazy conjugate or sign.
            leaf = leaf.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        if isinstance(leaf, Sharded) or is_like(leaf):
            slots.append(_tensor_slot(value, root, index, leaf, device))
            tensors.append(leaf)
        elif static:
            slots.append(_static(value, root, index, leaf))
    return Argument(structure, tuple(slots)), tensors


def _path(value: Any, root: str, index: int) -> str:
    return tree.leaf_paths(value, root, is_leaf=is_sharded)[index]


def _tensor_slot(
    value: Any, root: str, index: int, leaf: Any, device: torch.device
) -> ArgLeaf | Input:
    if isinstance(leaf, Sharded):
        path = _path(value, root, index)
        layout = dataclasses.replace(leaf.layout, path=path)
        spec = ShapeDtype(layout.shape, leaf.dtype)
        return ArgLeaf(path, spec, LeafLayouts(layout, layout, layout), tuple(leaf.local.shape))
    spec = ShapeDtype(tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, ShapeDtype):
        return Input(spec, contiguous_stride(spec.shape), device)
    if leaf.device != device:
        raise LayoutError(
            explain(
                f"{_path(value, root, index)} is on the wrong device",
                expected=device,
                got=leaf.device,
                do=f"move it with .to({str(device)!r}) before the call",
            )
        )
    stride = tuple(leaf.stride()) if leaf.layout == torch.strided else ()
    return Input(spec, stride, leaf.device)


def _static(value: Any, root: str, index: int, leaf: Any) -> Static:
    try:
        hash(leaf)
    except TypeError:
        raise LayoutError(
            explain(
                f"{_path(value, root, index)} is neither a tensor nor hashable",
                expected="a tensor, number, string, callable or None",
                got=type(leaf),
                do="make a tensor of it, such as torch.from_numpy(array)",
            )
        ) from None
    refuse_hidden(leaf, _path(value, root, index) if holds_tensors(leaf) else "")
    return Static(type(leaf), leaf)


def refuse_hidden(leaf: Any, path: str) -> None:
    """Raises `LayoutError` for a leaf with tensors inside, which nobody would see."""
    if holds_tensors(leaf):
        raise LayoutError(
            explain(
                f"{path} is a {type(leaf).__name__}, which holds tensors and is no node of a tree",
                expected="tensors, and containers that are registered",
                got=type(leaf),
                do="register its class with zfunc.tree.register_node, or pass a dict of tensors",
            )
        )


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
