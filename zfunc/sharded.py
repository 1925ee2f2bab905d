"""`Sharded`: one leaf of the state, this rank's piece of it plus its layout.

It is a tree node with one child, the local tensor, so `tree.map` works on the pieces and trees with
different layouts have different structures. It is not a tensor: math with it raises instead of
working on a piece as if it were the whole.

Donation is a lease that travels with the local tensor. A step consumes the leases of the state
that it takes; whoever holds the same tensor, also through `tree.map`, then gets
`DonatedStateError`. A node rebuilt around another tensor starts a lease of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import optree
import torch
from torch.utils import _pytree as torch_pytree

from zfunc.errors import DonatedStateError, LayoutError, explain
from zfunc.layout import Layout, P
from zfunc.tree import register_node

__all__ = ["Lease", "Sharded", "consume", "is_sharded", "whole"]


class Lease:
    """Whether the buffer of one local tensor may still be read.

    All leases compare equal: they never make two tree structures differ.
    """

    __slots__ = ("_tensor", "consumed_by")

    def __init__(self, local: Any):
        self._tensor = weakref.ref(local) if isinstance(local, torch.Tensor) else None
        self.consumed_by = ""

    def covers(self, local: Any) -> bool:
        """Whether this lease was given for that very tensor, or for one that it is a view of."""
        own = None if self._tensor is None else self._tensor()
        return own is not None and (own is local or _share(own, local))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lease)

    def __hash__(self) -> int:
        return hash(Lease)

    def __repr__(self) -> str:
        return f"consumed by {self.consumed_by}" if self.consumed_by else "held"


class Sharded:
    """This rank's piece of a leaf, and the layout that says of what.

    Attributes:
        layout: the whole leaf's shape, its spec and mesh.

    Example:
        >>> from zfunc.meshes import abstract_mesh
        >>> layout = Layout((2, 3), P(), abstract_mesh({"shard": 2}))
        >>> Sharded(torch.zeros(2, 3), layout).shape
        (2, 3)
    """

    __slots__ = ("_lease", "_local", "layout")
    is_named_whole = True

    def __init__(self, local: Any, layout: Layout, lease: Lease | None = None):
        self._local = local
        self._lease = lease
        self.layout = layout

    @property
    def lease(self) -> Lease:
        """The lease, which begins when it is first asked for."""
        if self._lease is None:
            self._lease = Lease(self._local)
        return self._lease

    @property
    def local(self) -> Any:
        """The local tensor: 1-D without padding for `Flat`, the whole leaf for `P()`.

        Raises:
            DonatedStateError: a step consumed it.
        """
        if self._lease is not None and self._lease.consumed_by:
            raise DonatedStateError(
                explain(
                    f"{self.layout.path or 'this leaf'} was donated",
                    got=f"a state that {self._lease.consumed_by} consumed",
                    do="use the state which that call returned, or shard(..., donate=False)",
                )
            )
        return self._local

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the leaf."""
        return self._local.dtype

    def __copy__(self) -> Sharded:
        return Sharded(self._local, self.layout, self.lease)

    def __reduce__(self) -> tuple[Any, ...]:
        return Sharded, (self.local, self.layout)

    def __repr__(self) -> str:
        dtype = str(getattr(self._local, "dtype", "?")).removeprefix("torch.")
        spec, mesh = self.layout.spec, self.layout.mesh
        return f"Sharded({dtype}{list(self.layout.shape)}, {spec}, {mesh}, {self.lease})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ):
        """Refuses tensor functions: a piece is not the leaf."""
        leaves = torch_pytree.tree_leaves((args, kwargs), is_sharded)
        _refuse(next(filter(is_sharded, leaves)), getattr(func, "__name__", str(func)))


def _refuse(leaf: Sharded, operation: str) -> NoReturn:
    raise LayoutError(
        explain(
            f"{leaf.layout.path or 'a Sharded leaf'} entered tensor math ({operation})",
            expected="a tensor",
            got=repr(leaf),
            do="read it whole with zfunc.gather, or work on the pieces with zfunc.tree.map",
        )
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Sharded, *_: Any) -> NoReturn:
        _refuse(self, name)

    return refuse


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "matmul",
    "pow",
    "lt",
    "le",
    "gt",
    "ge",
    "abs",
    "bool",
):
    setattr(Sharded, f"__{_name}__", _refusing(_name))
for _name in (
    "radd",
    "rsub",
    "rmul",
    "rtruediv",
    "rmatmul",
    "rpow",
    "neg",
    "getitem",
    "float",
    "floordiv",
    "mod",
):
    setattr(Sharded, f"__{_name}__", _refusing(_name))


def _share(one: torch.Tensor, other: Any) -> bool:
    """Whether two tensors use one buffer."""
    try:
        return one.untyped_storage()._cdata == other.untyped_storage()._cdata
    except (AttributeError, NotImplementedError):  # no tensor, or one that torch.func wraps
        return False


def is_sharded(node: Any) -> bool:
    """Whether a node is `Sharded`: the `is_leaf` of code that works on whole leaves."""
    return isinstance(node, Sharded)


def whole(tensor: torch.Tensor, like: Layout) -> Sharded:
    """Wraps a tensor that every rank holds whole, on the mesh of another layout."""
    return Sharded(tensor, Layout(tuple(tensor.shape), P(), like.mesh, like.path))


def consume(leaf: Sharded, by: str) -> torch.Tensor:
    """Ends a leaf's lease and hands over its buffer.

    Args:
        leaf: a leaf whose lease is held.
        by: what consumes it, for the message of later uses.

    Returns:
        A new tensor over the same buffer, for the next state.

    Raises:
        DonatedStateError: the lease was consumed before.
    """
    local = leaf.local
    leaf.lease.consumed_by = by
    return local.detach()


def _flatten(leaf: Sharded) -> tuple[tuple[Any], tuple[Layout, Lease], tuple[str]]:
    return (leaf.local,), (leaf.layout, leaf.lease), ("local",)


def _unflatten(context: tuple[Layout, Lease], children: Any) -> Sharded:
    layout, lease = context
    (local,) = children
    return Sharded(local, layout, lease if lease.covers(local) else None)


register_node(Sharded, _flatten, _unflatten, path_entry_type=optree.GetAttrEntry)
torch_pytree.register_pytree_node(
    Sharded,
    lambda leaf: ([leaf.local], (leaf.layout, leaf.lease)),
    lambda children, context: _unflatten(context, children),
    serialized_type_name="zfunc.Sharded",
)
