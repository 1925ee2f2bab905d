"""Ranks without communication: cut a tree into every rank's `Sharded` pieces, and put it together.

The oracle of the sharded tests is the same transform on the whole leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zfunc import tree
from zfunc.layout import Flat, Layout, P, Spec
from zfunc.meshes import Mesh
from zfunc.sharded import Sharded

__all__ = ["AllRanksInfo", "clone", "cut", "join"]


def clone(nodes: Any) -> Any:
    """A tree of new tensors with the same values."""
    return tree.map(torch.clone, nodes)


def cut(whole: Mapping[str, Tensor], specs: Mapping[str, Spec], world: int) -> list[Any]:
    """Each rank's tree of pieces; cut by numpy's rule for equal slices, not by `Layout.range`."""
    parts = []
    for rank in range(world):
        mesh = Mesh({"shard": world}, rank=rank, processes=tuple(range(world)))
        parts.append(
            {
                name: Sharded(
                    _piece(x, specs[name], rank, world),
                    Layout(tuple(x.shape), specs[name], mesh, f"params['{name}']"),
                )
                for name, x in whole.items()
            }
        )
    return parts


def _piece(x: Tensor, spec: Spec, rank: int, world: int) -> Tensor:
    if isinstance(spec, P):
        return x.clone()
    chunk = math.ceil(x.numel() / world)
    return x.reshape(-1)[rank * chunk : (rank + 1) * chunk].clone()


def join(parts: list[Any]) -> dict[str, Tensor]:
    """The whole leaves; what is replicated must be equal on every rank."""
    whole = {}
    for name, first in parts[0].items():
        pieces = [part[name].local for part in parts]
        if isinstance(first.layout.spec, Flat):
            whole[name] = torch.cat(pieces).reshape(first.shape)
        else:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces)
            whole[name] = pieces[0]
    return whole


@dataclasses.dataclass(frozen=True)
class AllRanksInfo:
    """Knows the sums of the raw gradients, by the identity of one rank's pieces.

    Attributes:
        pieces: the raw gradients of this rank.
        sums: the sum of squares of each whole leaf.
    """

    pieces: Any
    sums: Tensor

    def sum_squares(self, updates: Any) -> Tensor:
        """Looks the sums up; anything but the raw gradients is an error of the test."""
        known = {id(piece): i for i, piece in enumerate(tree.leaves(self.pieces))}
        return self.sums[[known[id(piece)] for piece in tree.leaves(updates)]]
