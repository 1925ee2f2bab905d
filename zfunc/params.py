"""The parameter tree of a step: which leaves it has, how each is cut, and which of them train."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc import tree
from zfunc.agree import exchange_facts, hash_of
from zfunc.capture import Argument, LeafSlot, Static
from zfunc.capture.slots import refuse_hidden, unfit
from zfunc.errors import LayoutError, TreeMismatchError, explain
from zfunc.layout import Dtypes, LeafLayouts, ShapeDtype, layouts_of
from zfunc.meshes import Mesh
from zfunc.precision import dtypes_of
from zfunc.sharded import Sharded, is_sharded

__all__ = ["ParamTable", "checksum", "compare_checksums", "cut", "leaf_facts", "trains"]


@dataclasses.dataclass(frozen=True, eq=False)
class ParamTable:
    """One structure of parameters under one step's options; compared by identity.

    Attributes:
        argument: the parameters as capture sees them.
        slots: the slots of the tensor leaves, in canonical order.
        trainable: the positions among `slots` that train.
    """

    argument: Argument
    slots: tuple[LeafSlot, ...]
    trainable: tuple[int, ...]

    @classmethod
    def of(
        cls, params: Any, mesh: Mesh, specs: Any, trainable: Any, precision: Any = None
    ) -> ParamTable:
        """Describes a parameter tree whose leaves are tensors, `Sharded`, `ShapeDtype` or static.

        Raises:
            LayoutError: a spec does not fit.
            TreeMismatchError: an option is not a prefix of the tree, or there is no tensor leaf.
        """
        leaves, structure = tree.flatten(params, is_leaf=is_sharded)
        paths = tree.leaf_paths(params, is_leaf=is_sharded)
        skeleton = tree.unflatten(structure, range(len(leaves)))
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
        layouts = layouts_of(specs, skeleton, shapes, paths, mesh)
        train = tree.broadcast_prefix(trainable, skeleton, name="trainable")
        for path, on in zip(paths, train, strict=True):
            if not isinstance(on, bool):
                raise LayoutError(
                    explain(
                        f"trainable has {on!r} for {path}",
                        expected="True or False",
                        do="make a tree of bools by path with zfunc.tree.mask",
                    )
                )
        found = [None if _is_static(leaf) else leaf.dtype for leaf in leaves]
        columns = leaves, paths, layouts, train, dtypes_of(precision, skeleton, found)
        slots = [_slot(*row) for row in zip(*columns, strict=True)]
        tensors = tuple(slot for slot in slots if isinstance(slot, LeafSlot))
        if not tensors:
            raise TreeMismatchError(
                explain("params has no tensor leaf", got=structure, do="pass a tree of tensors")
            )
        chosen = tuple(i for i, slot in enumerate(tensors) if slot.trainable)
        return cls(Argument(structure, tuple(slots)), tensors, chosen)

    @functools.cached_property
    def facts(self) -> str:
        """What must be equal on every rank, one leaf a line."""
        return "\n".join(
            f"{slot.path}: {slot.dtypes} {list(slot.spec.shape)}"
            f"{'' if slot.trainable else ' frozen'}, params {slot.layouts.params.spec},"
            f" grads {slot.layouts.grads.spec}, opt {slot.layouts.opt.spec}"
            for slot in self.slots
        )

    @functools.cached_property
    def facts_hash(self) -> str:
        """A hash of `facts`."""
        return hash_of(self.facts).hex()

    def leaves_of(self, params: Any) -> list[Sharded]:
        """The `Sharded` leaves of a tree of this structure, in canonical order.

        Raises:
            LayoutError: a leaf is a plain tensor, or cut in another way than this step cuts it.
        """
        leaves = [x for x in tree.leaves(params, is_leaf=is_sharded) if not _is_static(x)]
        for leaf, slot in zip(leaves, self.slots, strict=True):
            dtype = slot.dtypes.stored
            fits = isinstance(leaf, Sharded) and leaf.layout == slot.layouts.params
            if not (fits and leaf.dtype == dtype):
                raise LayoutError(
                    explain(
                        f"{slot.path} is not laid out for this step",
                        expected=f"{dtype} {slot.layouts.params.spec} over"
                        f" {slot.layouts.params.mesh}",
                        got=repr(leaf) if isinstance(leaf, Sharded) else type(leaf),
                        do="make states with Step.init, bring others over with Step.adopt",
                    )
                )
            if tuple(leaf.local.shape) != slot.layouts.params.local_shape:
                raise LayoutError(
                    explain(
                        f"{slot.path} has a piece of another shape than its layout says",
                        expected=list(slot.layouts.params.local_shape),
                        got=list(leaf.local.shape),
                        do="map pieces to pieces of the same shape; cut whole tensors with scatter",
                    )
                )
        return leaves

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The tree with other leaves in place of its tensors; static leaves stay."""
        remaining = iter(leaves)
        filled = [
            s.value if isinstance(s, Static) else next(remaining) for s in self.argument.slots
        ]
        return tree.unflatten(self.argument.structure, filled)

    def trainable_tree(self, leaves: Sequence[Any]) -> Any:
        """The tree that an optimizer sees: `leaves` where leaves train, None elsewhere."""
        chosen = dict(zip(self.trainable, leaves, strict=True))
        filled, position = [], 0
        for slot in self.argument.slots:
            is_tensor = isinstance(slot, LeafSlot)
            filled.append(chosen.get(position) if is_tensor else None)
            position += is_tensor
        return tree.unflatten(self.argument.structure, filled)

    def trainable_leaves(self, updated: Any) -> list[Any]:
        """The leaves of a tree as `trainable_tree` makes it, in canonical order."""
        return tree.leaves(updated, is_leaf=is_sharded)


def leaf_facts(params: Any) -> tuple[Any, ...]:
    """What distinguishes trees of one structure: dtypes of tensors, type and value of the rest."""
    return tuple(_fact(leaf) for leaf in tree.leaves(params))


def _fact(leaf: Any) -> Any:
    if not _is_static(leaf):
        return leaf.dtype
    try:
        hash(leaf)
    except TypeError:
        return type(leaf)  # `ParamTable.of` refuses it by its path
    return Static(type(leaf), leaf)


def trains(dtype: torch.dtype) -> bool:
    """Whether leaves of a dtype can train: floating of 16 bits or more, and complex."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def cut(tensor: Tensor, slot: LeafSlot, mesh: Mesh) -> Sharded:
    """This rank's piece of a leaf, in a buffer of its own."""
    layout, dtype = slot.layouts.params, slot.dtypes.stored
    tensor = tensor.detach().to(mesh.device).resolve_conj().resolve_neg()
    if layout.axis is not None:
        start, stop = layout.range
        tensor = tensor.reshape(-1)[start:stop]
    return Sharded(tensor.to(dtype, copy=True, memory_format=torch.contiguous_format), layout)


def compare_checksums(sums: Sequence[int] | Exception, paths: Sequence[str], mesh: Mesh) -> None:
    """Raises on every rank if some rank's copy of a leaf differs, or if some rank made none.

    Args:
        sums: one checksum per leaf, or why this rank has none.
        paths: the path of each leaf.
        mesh: the mesh; every rank must call.

    Raises:
        LayoutError: a leaf differs; names it.
        RemoteRankError: another rank failed; this rank raises its own exception.
    """
    if mesh.comm is None:
        if isinstance(sums, Exception):
            raise sums
        return
    rows = exchange_facts(mesh, sums, "init")
    for rank, row in enumerate(rows):
        if row == rows[0]:
            continue
        differing = [i for i, (a, b) in enumerate(zip(row, rows[0], strict=True)) if a != b]
        raise LayoutError(
            explain(
                f"{paths[differing[0]] if differing else 'params'} differs between ranks",
                expected="the same values on every rank before they are cut",
                got=f"rank {rank} has another tensor than rank 0 ({len(differing)} such leaves)",
                do="seed every rank alike, or pass init a function of a key",
            )
        )


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's values."""
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # With one element or none any stride counts as contiguous, but only 1 may be viewed as bytes.
    flat = data.reshape(-1).as_strided((data.numel(),), (1,))
    return zlib.crc32(flat.view(torch.uint8).numpy())  # pyright: ignore


def _is_static(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor | Sharded | ShapeDtype)


def _slot(
    leaf: Any, path: str, row: LeafLayouts, trainable: bool, dtypes: Dtypes
) -> LeafSlot | Static:
    if _is_static(leaf):
        try:
            hash(leaf)
        except TypeError:
            raise LayoutError(
                explain(
                    f"{path} is neither a tensor nor hashable",
                    expected="a tensor, number, string or callable",
                    got=type(leaf),
                    do="make a tensor of it, or register its class with zfunc.tree.register_node",
                )
            ) from None
        refuse_hidden(leaf, path)
        return Static(type(leaf), leaf)
    problem = unfit(leaf) if isinstance(leaf, Tensor) else ""
    if problem:
        raise LayoutError(
            explain(
                f"{path} is {problem}",
                expected="a plain strided tensor",
                do="use .to_dense(), .dequantize() or .full_tensor()",
            )
        )
    # What is gathered is cast before; what is whole anyway is cast by the function.
    dtype = dtypes.stored if row.params.is_whole else dtypes.compute
    spec = ShapeDtype(tuple(leaf.shape), dtype)
    return LeafSlot(path, spec, row, trainable and trains(leaf.dtype), dtypes)
