"""How tensors are cut into messages, and how the parts of a sum are added.

A collective over n ranks cuts each full tensor into n pieces. A piece of `DIRECT_BYTES` or more
travels alone, straight from and into the tensor that holds it; the smaller ones of one call are
copied, per dtype, into one message for each peer, so that the number of messages does not depend on
the number of leaves. Every rank derives the same split from sizes alone. All communicators share
these rules, so virtual ranks count the messages that real ones send, and add in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import LayoutError, explain
from zfunc.meshes import chunk_numel

__all__ = [
    "DIRECT_BYTES",
    "CommStats",
    "Split",
    "add_in_order",
    "check_pieces",
    "check_same",
    "count_messages",
    "pieces",
    "split_by_size",
]

DIRECT_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class CommStats:
    """What one rank has sent since its mesh was made.

    Attributes:
        messages: messages of gathers and reduces.
        payload_bytes: bytes in those messages.
        exchanges: calls of `exchange`.
    """

    messages: int = 0
    payload_bytes: int = 0
    exchanges: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Which tensors of one call travel alone and which together, by index.

    Attributes:
        direct: tensors whose pieces are messages of their own.
        together: groups of one dtype, and of one dtype of sums, that share a message.
    """

    direct: tuple[int, ...]
    together: tuple[tuple[int, ...], ...]


def split_by_size(
    tensors: Sequence[Tensor], parts: int, outs: Sequence[Tensor] | None = None
) -> Split:
    """Decides how the tensors of one call travel when each is cut into `parts` pieces.

    Tensors that are summed into `outs` of several dtypes do not share a message: each group is
    added in one dtype.

    Example:
        >>> split_by_size([torch.zeros(4), torch.zeros(1 << 20), torch.zeros(0)], 2)
        Split(direct=(1,), together=((0,),))
    """
    direct: list[int] = []
    together: dict[Any, list[int]] = {}
    for index, (tensor, out) in enumerate(zip(tensors, outs or tensors, strict=True)):
        numel = tensor.numel()
        if chunk_numel(numel, parts) * tensor.element_size() >= DIRECT_BYTES:
            direct.append(index)
        elif numel:
            together.setdefault((tensor.dtype, out.dtype), []).append(index)
    return Split(tuple(direct), tuple(tuple(group) for group in together.values()))


def pieces(full: Tensor, parts: int) -> list[Tensor]:
    """Cuts a 1-D tensor into `parts` views, the last ones shorter or empty.

    Example:
        >>> [piece.tolist() for piece in pieces(torch.arange(5), 4)]
        [[0, 1], [2, 3], [4], []]
    """
    numel = full.numel()
    chunk = chunk_numel(numel, parts)
    sizes = [max(0, min(chunk, numel - index * chunk)) for index in range(parts)]
    return list(full.split_with_sizes(sizes))


def add_in_order(terms: Sequence[Tensor], out: Tensor) -> None:
    """Writes `terms[0] + terms[1] + ...`, added in that order, into `out`.

    `out` may be one of the first two terms: what arrives first needs no buffer of its own.
    """
    if len(terms) == 1:
        if terms[0] is not out:
            out.copy_(terms[0])
        return
    if terms[0].dtype == out.dtype:
        torch.add(terms[0], terms[1], out=out)
        rest = terms[2:]
    else:  # the first sum is already one of the wider dtype
        out.copy_(terms[0])
        rest = terms[1:]
    for term in rest:
        out.add_(term)


def count_messages(
    sizes: Sequence[Sequence[Tensor]], split: Split, *, itself: int
) -> tuple[int, int]:
    """Counts what one rank sends: messages and bytes.

    Args:
        sizes: for each receiver, the tensors whose numbers of elements go to it, one per leaf.
        split: how they travel.
        itself: the receiver that is the sender, which costs nothing.

    Returns:
        The number of messages and the number of bytes.
    """
    messages = total = 0
    for receiver, tensors in enumerate(sizes):
        if receiver == itself:
            continue
        for group in (*((index,) for index in split.direct), *split.together):
            nbytes = sum(tensors[index].numel() * tensors[index].element_size() for index in group)
            messages += nbytes > 0
            total += nbytes
    return messages, total


def check_pieces(
    fulls: Sequence[Tensor], shards: Sequence[Tensor], size: int, index: int, *, sums: bool = False
) -> None:
    """Raises `LayoutError` unless each shard is this rank's piece of its full tensor.

    The shard of a sum may be of a wider dtype than its terms.
    """
    _check_count(fulls, shards)
    for place, (full, shard) in enumerate(zip(fulls, shards, strict=True)):
        numel = full.numel()
        chunk = chunk_numel(numel, size)
        wanted = max(0, min(chunk, numel - index * chunk))
        fits = _holds(shard, full) if sums else shard.dtype == full.dtype
        if shard.numel() != wanted or not fits:
            _refuse(place, f"{wanted} elements of {full.dtype}", shard)


def check_same(tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Raises `LayoutError` unless each output is as large as its tensor, of its dtype or wider."""
    _check_count(tensors, outs)
    for place, (tensor, out) in enumerate(zip(tensors, outs, strict=True)):
        if out.numel() != tensor.numel() or not _holds(out, tensor):
            _refuse(place, f"{tensor.numel()} elements of {tensor.dtype}", out)


def _holds(out: Tensor, source: Tensor) -> bool:
    """Whether every value of one tensor is exact in the other's dtype."""
    return torch.promote_types(out.dtype, source.dtype) == out.dtype


def _check_count(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    if len(left) != len(right):
        raise LayoutError(
            explain(
                "a collective was given lists of different lengths",
                expected=f"{len(left)} tensors",
                got=f"{len(right)} tensors",
                do="give one shard or output for each full tensor",
            )
        )


def _refuse(place: int, expected: str, got: Tensor) -> None:
    raise LayoutError(
        explain(
            f"tensor {place} of a collective has the wrong size",
            expected=expected,
            got=f"{got.numel()} elements of {got.dtype}",
            do="size it by `shard_range` of the mesh axis",
        )
    )
