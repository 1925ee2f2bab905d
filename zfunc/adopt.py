"""Adopt: the state of one step becomes a state of another on the same processes.

Leaves whose layout changes are gathered one at a time and cut anew; what the optimizer keeps is
matched by path, so a leaf that trains in both steps keeps its moments and counts, and a newly
trained one starts at 0.
"""

from __future__ import annotations

from typing import Any

import optree
import torch

from zfunc import tree
from zfunc.agree import Proposal, agree, hash_of, spelled, telling_others
from zfunc.collective import gather
from zfunc.errors import LayoutError, explain
from zfunc.layout import Layout, P
from zfunc.masters import joined, separated
from zfunc.params import ParamTable
from zfunc.scaling import fresh_scaler
from zfunc.sharded import Sharded, consume, is_sharded
from zfunc.state import State
from zfunc.training import Training
from zfunc.update import init_opt_state

__all__ = ["adopt"]


def adopt(training: Training, state: State) -> State:
    """Brings a state over to a step; see `Step.adopt`."""
    mesh, options = training.mesh, training.options
    what = f"adopt at step {int(state.step)}"
    with telling_others(mesh, what):
        old = [leaf for leaf in tree.leaves(state.params, is_leaf=is_sharded) if is_sharded(leaf)]
        masters, opt_state = separated(state.opt_state)
        kept = dict(_by_path(opt_state))
        exact = {leaf.layout.path: leaf for leaf in tree.leaves(masters, is_leaf=is_sharded)}
        given = [*old, *exact.values(), *(leaf for leaf in kept.values() if is_sharded(leaf))]
        _check_processes(given, mesh.processes)
        _ = [leaf.local for leaf in given]
        table = ParamTable.of(
            state.params, mesh, options.specs, options.trainable, options.precision
        )
        facts = "\n".join(
            [f"{spelled(state.tx)}", table.facts]
            + [f"{leaf.layout.path}: {leaf.layout.spec} over {leaf.layout.mesh}" for leaf in given]
        )
    agree(mesh, Proposal(bytes(16), hash_of(what, facts), lambda: facts), what)
    pairs = [
        (exact.get(slot.path, leaf), slot) for leaf, slot in zip(old, table.slots, strict=True)
    ]
    donate = options.donate
    leaves = [
        _relaid(leaf, slot.layouts.params, slot.dtypes.stored, donate=donate)
        for leaf, slot in pairs
    ]
    new_masters = [
        _relaid(leaf, slot.layouts.opt, torch.float32, donate=donate)
        if slot.dtypes.master and slot.trainable
        else None
        for leaf, slot in pairs
    ]

    def carry(path: tuple[Any, ...], leaf: Any) -> Any:
        source = kept.get(path)
        if not (isinstance(source, Sharded) and isinstance(leaf, Sharded)):
            return leaf if source is None else source
        return _relaid(source, leaf.layout, leaf.dtype, donate=donate)

    masters, fresh = separated(init_opt_state(state.tx, table, leaves, new_masters))
    opt_state = joined(masters, tree.map_with_path(carry, fresh, is_leaf=is_sharded))
    if options.donate:
        for leaf in given:
            consume(leaf, what)
    scaler = fresh_scaler(options.loss_scale)
    if scaler is not None and state.scaler is not None:
        scaler = state.scaler
    return State(state.step, table.rebuild(leaves), opt_state, state.key, scaler, state.tx)


def _check_processes(leaves: list[Sharded], processes: tuple[int, ...]) -> None:
    for leaf in leaves:
        if sorted(leaf.layout.mesh.processes) != sorted(processes):
            raise LayoutError(
                explain(
                    f"{leaf.layout.path} lives on other processes",
                    expected=processes,
                    got=leaf.layout.mesh.processes,
                    do="another number of processes goes through a checkpoint",
                )
            )


def _relaid(leaf: Sharded, layout: Layout, dtype: torch.dtype, *, donate: bool) -> Sharded:
    """The same leaf in another layout and dtype; over the same buffer where it may be."""
    if leaf.layout == layout:
        return Sharded(leaf.local.detach().to(dtype, copy=not donate), layout)
    full = gather(leaf)
    if not isinstance(layout.spec, P):
        start, stop = layout.range
        full = full.reshape(-1)[start:stop]
    return Sharded(full.to(dtype, copy=True), layout)


def _by_path(opt_state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    paths, leaves, _ = optree.tree_flatten_with_path(
        opt_state, is_leaf=is_sharded, namespace=tree.NAMESPACE
    )
    return list(zip(paths, leaves, strict=True))
