"""Masters: what the optimizer updates in place of a leaf that is stored in bfloat16 or float16.

Sums of small updates would be lost in the rounding of a narrow dtype (Micikevicius et al. 2018,
section 3.1). So the optimizer works in float32: on the leaf's master, which is cut as its state is,
and of which the leaf is the cast; or, without a master, on a copy that lives for the update. Such a
copy may be rounded at random, up as likely as it lies near (Gupta et al. 2015, "Deep learning with
limited numerical precision", section 3); the random bits are a function of step, leaf and element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc import random, tree
from zfunc.capture import LeafSlot
from zfunc.meshes import Mesh
from zfunc.sharded import Sharded, is_sharded

__all__ = ["Mastered", "cut_master", "joined", "per_leaf", "separated", "widened", "write_back"]

_ROUNDING_SEED = 0x5EED
_LOW_BITS = 16


class Mastered(NamedTuple):
    """What `State.opt_state` is where some leaf has a master.

    Attributes:
        masters: a tree like the parameters, None where a leaf has none.
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


def per_leaf(masters: Any, slots: Sequence[LeafSlot]) -> list[Sharded | None]:
    """The master of each of the leaves that train, None where a leaf has none."""
    nodes = iter(tree.leaves(masters, is_leaf=is_sharded))
    return [next(nodes) if slot.dtypes.master else None for slot in slots]


def widened(view: Sharded, slot: LeafSlot) -> Sharded:
    """A leaf's piece as the optimizer updates it: itself, or a float32 copy."""
    return Sharded(view.local.to(torch.float32), view.layout) if slot.dtypes.rounding else view


def write_back(
    updated: Sequence[Sharded], views: Sequence[Sharded], slots: Sequence[LeafSlot], step: int
) -> None:
    """Rounds what was updated in place of leaves into their own buffers.

    Args:
        updated: masters, copies, or the leaves' own pieces.
        views: the leaves' own pieces.
        slots: the leaves.
        step: the number of the step.
    """
    key = random.fold_in(random.key(_ROUNDING_SEED), step)
    for number, (source, view, slot) in enumerate(zip(updated, views, slots, strict=True)):
        if source is view:
            continue
        local = source.local.view(view.local.shape)
        if slot.dtypes.rounding == "stochastic" and not slot.dtypes.master:
            start = 0 if view.layout.axis is None else view.layout.range[0]
            local = _rounded_at_random(local, random.fold_in(key, number), start)
        view.local.copy_(local)


def _rounded_at_random(x: Tensor, key: Tensor, start: int) -> Tensor:
    """Float32 values that bfloat16 holds exactly: of both neighbours the nearer is the likelier.

    A random number below one unit of bfloat16 is added to the magnitude, and the rest cut off.
    """
    noise = random.randint(key, x.shape, 0, 1 << _LOW_BITS, start=start).to(x.device, torch.int32)
    bits = x.contiguous().view(torch.int32) + noise
    rounded = (bits >> _LOW_BITS << _LOW_BITS).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)
