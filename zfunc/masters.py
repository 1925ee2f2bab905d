"""Masters: float32 copies of leaves that are stored in bfloat16 or float16.

Sums of small updates would be lost in the rounding of a narrow dtype (Micikevicius et al. 2018,
section 3.1). So the optimizer works on the master, which is cut as its state is, and the leaf is
the master's cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc import tree
from zfunc.capture import LeafSlot
from zfunc.meshes import Mesh
from zfunc.sharded import Sharded, is_sharded

__all__ = ["Mastered", "cut_master", "joined", "per_leaf", "separated", "write_back"]


class Mastered(NamedTuple):
    """What `State.opt_state` is where some leaf has a master.

    Attributes:
        masters: a tree like the parameters, None where a leaf is its own master.
        state: the optimizer's own state.
    """

    masters: Any
    state: Any


def cut_master(tensor: Tensor, slot: LeafSlot, mesh: Mesh) -> Sharded | None:
    """This rank's piece of the master of a leaf, from the whole leaf as it was given."""
    if not (slot.dtypes.master and slot.trainable):
        return None
    layout = slot.layouts.opt
    whole = tensor.detach().to(mesh.device)
    start, stop = layout.range
    piece = whole if layout.axis is None else whole.reshape(-1)[start:stop]
    return Sharded(piece.to(torch.float32, copy=True), layout)


def separated(opt_state: Any) -> tuple[Any, Any]:
    """The tree of masters, or None, and the optimizer's own state."""
    if isinstance(opt_state, Mastered):
        return opt_state.masters, opt_state.state
    return None, opt_state


def joined(masters: Any, state: Any) -> Any:
    """The optimizer's part of a `State`."""
    return state if masters is None else Mastered(masters, state)


def write_back(masters: Sequence[Sharded | None], views: Sequence[Sharded]) -> None:
    """Rounds the masters into the leaves' own buffers."""
    for master, view in zip(masters, views, strict=True):
        if master is not None:
            view.local.copy_(master.local.view(view.local.shape))


def per_leaf(masters: Any, slots: Sequence[LeafSlot]) -> list[Sharded | None]:
    """The master of each of the leaves that train, None where a leaf is its own."""
    nodes = iter(tree.leaves(masters, is_leaf=is_sharded))
    return [next(nodes) if slot.dtypes.master else None for slot in slots]
