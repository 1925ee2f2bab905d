"""Update: the commit point's other half, from reduced gradients to the next state.

The optimizer works on this rank's pieces. Parameters that are whole on every rank (ZeRO-1 and -2)
lend it their slice and are gathered again after it. A donated state's leases are consumed here and
nowhere earlier, so that any fault before leaves it valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc import ops, optim, tree
from zfunc.capture import compat
from zfunc.errors import LayoutError, explain
from zfunc.execute import Verdict, sum_over_ranks
from zfunc.layout import Layout
from zfunc.masters import joined, per_leaf, separated, widened, write_back
from zfunc.meshes import Mesh
from zfunc.params import ParamTable
from zfunc.sharded import Sharded, consume, is_sharded, whole
from zfunc.state import State

__all__ = [
    "Updated",
    "check_opt_state",
    "commit",
    "init_opt_state",
    "opt_state_like",
    "renew",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Updated:
    """What an update made.

    Attributes:
        params: the parameter leaves, in canonical order.
        opt_state: the optimizer's state.
        applied: the rate and norm that the optimizer used.
    """

    params: tuple[Sharded, ...]
    opt_state: Any
    applied: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Info:
    """What transforms may ask about whole leaves: the raw squares are known from the status op."""

    mesh: Mesh
    raw: dict[int, float]
    threads: int

    def sum_squares(self, updates: Any) -> Tensor:
        leaves = tree.leaves(updates, is_leaf=is_sharded)
        if all(id(leaf.local) in self.raw for leaf in leaves):
            squares = [self.raw[id(leaf.local)] for leaf in leaves]
            return torch.tensor(squares, dtype=torch.float64)
        sums = ops.sum_squares([leaf.local for leaf in leaves], threads=self.threads)
        return sum_over_ranks(self.mesh, sums, [leaf.layout for leaf in leaves])

    def whole(self, updates: Any) -> Iterator[Tensor]:
        coming: tuple[Tensor, Any] | None = None
        for leaf in [*tree.leaves(updates, is_leaf=is_sharded), None]:
            ready, coming = coming, None if leaf is None else self._gather(leaf)
            if ready is not None:
                full, handle = ready
                if handle is not None:
                    handle.wait()
                yield full

    def _gather(self, leaf: Sharded) -> tuple[Tensor, Any]:
        """A leaf's whole tensor, and what to wait for before it is read."""
        axis = leaf.layout.axis
        if axis is None or self.mesh.comm is None or self.mesh.axis_size(axis) == 1:
            return leaf.local.view(leaf.layout.shape), None
        full = leaf.local.new_empty(leaf.layout.numel)
        handle = self.mesh.comm.gather(axis, [leaf.local], [full])
        return full.view(leaf.layout.shape), handle


def init_opt_state(
    tx: Any,
    table: ParamTable,
    leaves: Sequence[Sharded],
    masters: Sequence[Sharded | None] | None = None,
) -> Any:
    """Makes the optimizer's state for the trainable leaves, laid out by their opt specs.

    Args:
        tx: the optimizer.
        table: the parameters.
        leaves: their `Sharded` leaves.
        masters: the master of each, where it has one; None makes them from the leaves.
    """
    views = [_opt_view(table, i, leaves[i]) for i in table.trainable]
    slots = [table.slots[i] for i in table.trainable]
    wide = [widened(view, slot) for view, slot in zip(views, slots, strict=True)]
    own: list[Sharded | None] = [
        None if not slot.dtypes.master else copy if masters is None else masters[i]
        for i, slot, copy in zip(table.trainable, slots, wide, strict=True)
    ]
    targets = [copy if master is None else master for master, copy in zip(own, wide, strict=True)]
    layout = views[0].layout if views else None
    state = _wrapped(tx.init(table.trainable_tree(targets)), layout)
    return joined(
        None if all(master is None for master in own) else table.trainable_tree(own), state
    )


def opt_state_like(tx: Any, table: ParamTable) -> Any:
    """The state that an optimizer would have for these parameters, of fake tensors."""
    with compat.fake_mode():
        leaves = [
            Sharded(
                torch.empty(slot.layouts.params.local_shape, dtype=slot.dtypes.stored),
                slot.layouts.params,
            )
            for slot in table.slots
        ]
        return init_opt_state(tx, table, leaves)


def check_opt_state(opt_state: Any, like: Any) -> None:
    """Raises `LayoutError` unless an optimizer's state has the structure and layouts of `like`."""
    if tree.structure(opt_state) == tree.structure(like):
        return
    got, expected = _described(opt_state), _described(like)
    differing = [line for line in expected if line not in got] or ["nothing more"]
    extra = [line for line in got if line not in expected] or ["nothing in its place"]
    raise LayoutError(
        explain(
            "the optimizer's state is not laid out for this step",
            expected=differing[0],
            got=extra[0],
            do="bring states of other steps over with Step.adopt",
        )
    )


def _described(opt_state: Any) -> list[str]:
    """One line per leaf: its path, shape and spec."""
    paths = tree.leaf_paths(opt_state, "opt_state", is_leaf=is_sharded)
    leaves = tree.leaves(opt_state, is_leaf=is_sharded)
    return [
        f"{path}: {list(leaf.shape)} {leaf.layout.spec}" if is_sharded(leaf) else f"{path}: {leaf}"
        for path, leaf in zip(paths, leaves, strict=True)
    ]


def commit(
    state: State,
    table: ParamTable,
    leaves: Sequence[Sharded],
    grads: Sequence[Tensor | None],
    verdict: Verdict,
    *,
    mesh: Mesh,
    donate: bool,
    threads: int,
    what: str,
) -> Updated:
    """Runs the optimizer.

    Args:
        state: the state that the step took.
        table: its parameters.
        leaves: their `Sharded` leaves.
        grads: per trainable leaf its reduced gradient, None for zero.
        verdict: what all ranks agreed on.
        mesh: the mesh.
        donate: whether to write into the state's buffers and end its leases.
        threads: threads of native kernels.
        what: the call, for later errors.

    Returns:
        The new leaves and optimizer state.
    """
    opt_leaves, structure = tree.flatten(state.opt_state, is_leaf=is_sharded)
    _check_leases([*leaves, *opt_leaves])
    take = _taker(donate, what)
    new_leaves = [take(leaf) for leaf in leaves]
    masters, opt_state = separated(tree.unflatten(structure, [take(leaf) for leaf in opt_leaves]))
    views = [_opt_view(table, i, new_leaves[i]) for i in table.trainable]
    slots = [table.slots[i] for i in table.trainable]
    rows = zip(per_leaf(masters, slots), views, slots, strict=True)
    targets = [widened(view, slot) if master is None else master for master, view, slot in rows]
    wrapped = [_gradient(target, grad) for target, grad in zip(targets, grads, strict=True)]
    raw = {id(g.local): s for g, s in zip(wrapped, verdict.squares, strict=True)}
    _, opt_state, applied = optim.apply(
        state.tx,
        table.trainable_tree(wrapped),
        opt_state,
        table.trainable_tree(targets),
        _Info(mesh, raw, threads),
        threads=threads,
    )
    write_back(targets, views, slots, int(state.step))
    _gather_replicated(table, new_leaves, mesh)
    opt_state = joined(masters, _wrapped(opt_state, leaves[0].layout))
    return Updated(tuple(new_leaves), opt_state, applied)


def renew(state: State, leaves: Sequence[Sharded], *, donate: bool, what: str) -> tuple[Any, Any]:
    """Hands a state on unchanged: ends its leases and starts new ones over the same buffers."""
    if not donate:
        return tuple(leaves), state.opt_state
    take = _taker(True, what)
    new_leaves = tuple(take(leaf) for leaf in leaves)
    return new_leaves, tree.map(take, state.opt_state, is_leaf=is_sharded)


def _check_leases(leaves: Sequence[Any]) -> None:
    """Raises `DonatedStateError`, before anything is consumed, if a leaf was."""
    for leaf in leaves:
        if isinstance(leaf, Sharded) and leaf.lease.consumed_by:
            _ = leaf.local


def _taker(donate: bool, what: str) -> Callable[[Any], Any]:
    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Sharded):
            return leaf
        local = consume(leaf, what) if donate else leaf.local.clone()
        return Sharded(local, leaf.layout)

    return take


def _opt_view(table: ParamTable, position: int, leaf: Sharded) -> Sharded:
    """The part of a parameter that this rank's optimizer owns, in the parameter's own buffer."""
    row = table.slots[position].layouts
    if row.params.axis == row.opt.axis:
        return leaf
    start, stop = row.opt.range
    return Sharded(leaf.local.view(-1)[start:stop], row.opt)


def _gradient(view: Sharded, grad: Tensor | None) -> Sharded:
    if grad is None:
        grad = torch.zeros_like(view.local)
    return Sharded(grad.view(view.local.shape).to(view.dtype), view.layout)


def _gather_replicated(table: ParamTable, leaves: Sequence[Sharded], mesh: Mesh) -> None:
    """Completes parameters of which each rank has updated its slice."""
    by_axis: dict[str, list[int]] = {}
    for i in table.trainable:
        row = table.slots[i].layouts
        if row.opt.axis is not None and row.params.axis is None:
            by_axis.setdefault(row.opt.axis, []).append(i)
    for axis, chosen in by_axis.items():
        if mesh.comm is None or mesh.axis_size(axis) == 1:
            continue
        fulls = [leaves[i].local.view(-1) for i in chosen]
        ranges = [table.slots[i].layouts.opt.range for i in chosen]
        pieces = [full[a:b] for full, (a, b) in zip(fulls, ranges, strict=True)]
        mesh.comm.gather(axis, pieces, fulls).wait()


def _wrapped(opt_state: Any, layout: Layout | None) -> Any:
    """Gives every plain tensor of an optimizer's state the layout of what is whole everywhere."""
    if layout is None:
        return opt_state

    def wrap(leaf: Any) -> Any:
        return whole(leaf, layout) if isinstance(leaf, Tensor) else leaf

    return tree.map(wrap, opt_state, is_leaf=is_sharded)
