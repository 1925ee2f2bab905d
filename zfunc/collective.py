"""Collectives as transforms: `gather` and `scatter`, inside a loss and outside.

Each is an `autograd.Function` whose backward is the other: gather and scatter(reduce="sum") are
each other's transpose, "mean" transposes to gather / n, "slice" to zeros around the piece. During
capture they become ops of the program; outside they communicate at once. Derivatives in forward
mode and vmap have no rule here: torch refuses them rather than answer with zeros.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from zfunc import tree as trees
from zfunc.agree import Proposal, agree, hash_of, telling_others
from zfunc.capture import lookup_full
from zfunc.errors import CaptureError, LayoutError, explain
from zfunc.layout import layouts_of
from zfunc.meshes import Mesh, shard_range
from zfunc.scope import scope
from zfunc.sharded import Sharded, is_sharded

__all__ = ["gather", "scatter"]

# The ops that stand for communication while a function is traced; `Collective` runs them.
_LIBRARY = torch.library.Library("zfunc", "DEF")
_LIBRARY.define("gather(Tensor piece, str axis, int[] shape) -> Tensor")
_LIBRARY.define("sum(Tensor full, str axis, int numel) -> Tensor")


@torch.library.register_fake("zfunc::gather", lib=_LIBRARY)
def _(piece: Tensor, axis: str, shape: Sequence[int]) -> Tensor:
    return piece.new_empty(shape)


@torch.library.register_fake("zfunc::sum", lib=_LIBRARY)
def _(full: Tensor, axis: str, numel: int) -> Tensor:
    return full.new_empty((numel,))


def gather(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """Makes every `Sharded` leaf whole on this rank.

    Differentiable; its transpose is `scatter(reduce="sum")`. Inside a loss, `Sharded` arguments are
    read with it and scheduled like parameters. Outside, every rank must call it.

    Args:
        tree: a tree; leaves that are not `Sharded` stay.
        dtype: cast the pieces to this before they travel.

    Returns:
        The tree with whole tensors, which no later step writes into.

    Raises:
        ProgramMismatchError: ranks gather different leaves.
        RankLostError: another rank did not take part in time.

    Example:
        >>> import zfunc
        >>> x = zfunc.scatter({"w": torch.arange(4.0)}, zfunc.mesh(), zfunc.Flat())
        >>> gather(x)["w"]
        tensor([0., 1., 2., 3.])
    """
    leaves, structure = trees.flatten(tree, is_leaf=is_sharded)
    _refuse_dynamic("gather")
    if scope() is None:
        fulls = _gather_now(leaves, dtype)
    else:
        fulls = [_gather_traced(leaf, dtype) if is_sharded(leaf) else leaf for leaf in leaves]
    return trees.unflatten(structure, fulls)


def scatter(tree: Any, mesh: Mesh, specs: Any, *, reduce: str = "slice") -> Any:
    """Cuts every tensor of a tree over a mesh.

    Differentiable. "slice": each rank keeps its slice of its own copy, without communication.
    "sum" and "mean": the sum (or mean) over the ranks of the spec's axis is cut; with `P()`, over
    all ranks.

    Args:
        tree: a tree of whole tensors; other leaves stay.
        mesh: the mesh.
        specs: a prefix tree of `Flat` and `P()`.
        reduce: "slice", "sum" or "mean".

    Returns:
        The tree with `Sharded` leaves.

    Raises:
        LayoutError: a spec does not fit, or `reduce` is none of the three.

    Example:
        >>> import zfunc
        >>> scatter(torch.ones(2, 2), zfunc.mesh(), zfunc.Flat()).local
        tensor([1., 1., 1., 1.])
    """
    if reduce not in ("slice", "sum", "mean"):
        raise LayoutError(
            explain(f"scatter(reduce={reduce!r})", expected="'slice', 'sum' or 'mean'")
        )
    if reduce != "slice":
        _refuse_dynamic("scatter")
    leaves, structure = trees.flatten(tree)
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    paths = trees.leaf_paths(tree, "tree")
    rows = layouts_of({"params": specs}, tree, shapes, paths, mesh)
    made = [
        _scatter_leaf(leaf, row.params, mesh, reduce) if isinstance(leaf, Tensor) else leaf
        for leaf, row in zip(leaves, rows, strict=True)
    ]
    return trees.unflatten(structure, made)


def _refuse_dynamic(name: str) -> None:
    """Ranks that run Python of their own cannot meet in the middle of it."""
    current = scope()
    if current is not None and not current.traced:
        raise CaptureError(
            explain(
                f"{name} inside a loss on the dynamic rung",
                expected="a loss that can be traced, or one without collectives of its own",
                do="gather outside the loss and pass the result in the batch",
            )
        )


def _refuse_forward_mode(tensor: Tensor, name: str) -> None:
    """Refuses before anything is sent: a tangent would stay behind."""
    if forward_ad.unpack_dual(tensor).tangent is not None:
        raise CaptureError(
            explain(
                f"{name} under forward-mode differentiation (jvp)",
                expected="reverse mode",
                do="use torch.func.vjp or grad",
            )
        )


class _Gather(torch.autograd.Function):
    """Pieces along an axis -> the whole, of a shape."""

    @staticmethod
    def forward(piece: Tensor, mesh: Mesh, axis: str, shape: tuple[int, ...]) -> Tensor:
        if scope() is not None:
            return torch.ops.zfunc.gather(piece.contiguous(), axis, shape)
        full = piece.new_empty(shape)
        _run(mesh, "gather", axis, piece.contiguous().view(-1), full.view(-1))
        return full

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.mesh, ctx.axis, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return _Sum.apply(grad, ctx.mesh, ctx.axis), None, None, None


class _Sum(torch.autograd.Function):
    """Whole tensors -> this rank's piece of their sum along an axis."""

    @staticmethod
    def forward(full: Tensor, mesh: Mesh, axis: str) -> Tensor:
        start, stop = shard_range(full.numel(), mesh.axis_size(axis), mesh.index(axis))
        if scope() is not None:
            return torch.ops.zfunc.sum(full.contiguous(), axis, stop - start)
        piece = full.new_empty(stop - start)
        _run(mesh, "reduce", axis, full.contiguous().view(-1), piece)
        return piece

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        full, ctx.mesh, ctx.axis = inputs
        ctx.shape = tuple(full.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return _Gather.apply(grad, ctx.mesh, ctx.axis, ctx.shape), None, None


def _run(mesh: Mesh, name: str, axis: str, source: Tensor, out: Tensor) -> None:
    """One collective on the spot; along an axis of one rank a copy."""
    if mesh.axis_size(axis) == 1:
        out.copy_(source)
        return
    comm = _communicator(mesh)
    whole = out if name == "gather" else source
    _agree(mesh, name, [f"{axis}: {whole.dtype} [{whole.numel()}]"])
    getattr(comm, name)(axis, [source], [out]).wait()


def _agree(mesh: Mesh, what: str, facts: list[str]) -> None:
    """Learns that every rank is about to communicate the same."""
    agree(mesh, Proposal(bytes(16), hash_of(what, facts), lambda: "\n".join([what, *facts])), what)


def _communicator(mesh: Mesh) -> Any:
    if mesh.comm is None:
        raise LayoutError(
            explain(
                f"{mesh} is abstract: nothing can be gathered over it",
                expected="a mesh made by zfunc.mesh or zfunc.local_mesh",
            )
        )
    return mesh.comm


def _gather_traced(leaf: Sharded, dtype: torch.dtype | None) -> Tensor:
    full = lookup_full(leaf)
    if full is not None:
        return full if dtype is None else full.to(dtype)
    piece = leaf.local if dtype is None else leaf.local.to(dtype)
    if leaf.layout.axis is None:
        return piece
    return _Gather.apply(piece, leaf.layout.mesh, leaf.layout.axis, leaf.shape)  # pyright: ignore


def _gather_now(leaves: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    """Gathers a list of leaves at once, those along one axis in one call."""
    fulls = list(leaves)
    waiting: dict[tuple[Mesh, str], list[int]] = {}
    pieces: dict[int, Tensor] = {}
    with _telling_others(leaves):
        prepared = {
            i: _piece(leaf, dtype) for i, leaf in enumerate(leaves) if isinstance(leaf, Sharded)
        }
    for i, piece in prepared.items():
        leaf = leaves[i]
        axis, mesh = leaf.layout.axis, leaf.layout.mesh
        if axis is None or mesh.axis_size(axis) == 1:
            # A step writes into the buffers of the state that it takes: hand out others.
            fulls[i] = (piece.clone() if piece is leaf.local else piece).view(leaf.shape)
        elif piece.requires_grad and torch.is_grad_enabled():
            fulls[i] = _Gather.apply(piece, mesh, axis, leaf.shape)
        else:
            fulls[i] = piece.new_empty(leaf.shape)
            pieces[i] = piece.contiguous()
            waiting.setdefault((mesh, axis), []).append(i)
    for (mesh, axis), chosen in waiting.items():
        comm = _communicator(mesh)
        outs = [fulls[i].view(-1) for i in chosen]
        layouts = [(leaves[i].layout, pieces[i].dtype) for i in chosen]
        facts = [f"{axis}: {lay.path} {dtype} {list(lay.shape)}" for lay, dtype in layouts]
        _agree(mesh, "gather", facts)
        comm.gather(axis, [pieces[i] for i in chosen], outs).wait()
    return fulls


def _piece(leaf: Sharded, dtype: torch.dtype | None) -> Tensor:
    piece = leaf.local if dtype is None else leaf.local.to(dtype)
    _refuse_forward_mode(piece, "gather")
    return piece


def _telling_others(leaves: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """A failure inside is one on every rank, if any leaf is to be gathered at all."""
    for leaf in leaves:
        if isinstance(leaf, Sharded) and leaf.layout.axis is not None:
            mesh = leaf.layout.mesh
            if mesh.axis_size(leaf.layout.axis) > 1:
                return telling_others(mesh, "gather")
    return contextlib.nullcontext()


def _scatter_leaf(full: Tensor, layout: Any, mesh: Mesh, reduce: str) -> Sharded:
    """Cuts one tensor; sums run over the layout's axis, or over all axes for a whole leaf."""
    start, stop = layout.range
    if reduce == "slice":
        local = full if layout.axis is None else full.reshape(-1)[start:stop]
        # Outside, the state that this may become is written in place: never the caller's tensor.
        return Sharded(local.clone() if scope() is None else local, layout)
    axes = [layout.axis] if layout.axis is not None else list(reversed(mesh.axes))
    _refuse_forward_mode(full, "scatter")
    local = full
    for axis in axes:
        piece = _Sum.apply(local, mesh, axis)
        local = piece
        if layout.axis is None:
            local = _Gather.apply(piece, mesh, axis, tuple(full.shape))
    if reduce == "mean":
        local = local / math.prod(mesh.axis_size(axis) for axis in axes)  # pyright: ignore
    return Sharded(local, layout)
