"""Pack: the compressed model in as few bytes as it needs, and back, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy
import optree
import torch
from torch import Tensor

from zfunc import tree
from zfunc.compress.prune import Keep
from zfunc.compress.quantise import FakeQuantise, Levels
from zfunc.compress.rules import Rules, transform, walk

__all__ = ["Numbers", "Sparse", "pack", "unpack"]


@dataclasses.dataclass(frozen=True, slots=True)
class Numbers:
    """A quantised leaf; a node of a tree with two or three leaves.

    Attributes:
        numbers: uint8; of 4 bits or fewer two to a byte.
        scales: float32 [groups, 1].
        zeros: float32 [groups, 1]; None where they are 0.
        about: the shape and dtype of the leaf, the bits of a number, the elements of a group.
    """

    numbers: Any
    scales: Any
    zeros: Any
    about: tuple[tuple[int, ...], torch.dtype, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Sparse:
    """A pruned leaf; a node of a tree with two leaves.

    Attributes:
        values: [kept], the elements that are not 0.
        mask: uint8, one bit for each element.
        shape: the shape of the leaf.
    """

    values: Any
    mask: Any
    shape: tuple[int, ...]


def pack(params: Any, rules: Rules, *, keep: Keep | None = None, scores: Any = None) -> Any:
    """Exports a compressed model: `transform` with the same arguments, in few bytes.

    Args:
        params: whole parameters, such as `zfunc.gather(state.params)`.
        rules: as for `transform`; of several for a leaf, quantisation is the last.
        keep: as for `transform`.
        scores: as for `transform`.

    Returns:
        The tree with a `Numbers` in place of every quantised leaf and a `Sparse` in place of one
        that is only pruned. All its leaves are plain tensors, to be saved by any means.

    Raises:
        ValueError: a rule comes after quantisation.

    Example:
        >>> from zfunc import compress
        >>> packed = pack({"w": torch.ones(64, 64)}, {"w": compress.FakeQuantise(bits=4)})
        >>> sum(leaf.nbytes for leaf in tree.leaves(packed))
        2304
    """
    rows = walk(params, rules)
    first = {name: _pruning(name, applied) for name, _, applied in rows if applied}
    pruned = tree.leaves(transform(params, first, keep=keep, scores=scores) if first else params)
    made = []
    for (_, leaf, applied), value in zip(rows, pruned, strict=True):
        if not applied:
            made.append(leaf)
        elif isinstance(applied[-1], FakeQuantise):
            made.append(_numbers(value.detach(), applied[-1]))
        else:
            flat = value.detach().reshape(-1)
            made.append(Sparse(flat[flat != 0], _bits(flat != 0), tuple(value.shape)))
    return tree.unflatten(tree.structure(params), made)


def unpack(packed: Any) -> Any:
    """The tree that `transform` computes, from what `pack` made of it.

    Example:
        >>> from zfunc import compress
        >>> params, rules = {"w": torch.randn(3, 5)}, {"w": compress.FakeQuantise(4)}
        >>> torch.equal(unpack(pack(params, rules))["w"], compress.transform(params, rules)["w"])
        True
    """
    return tree.map(_unpacked, packed, is_leaf=lambda node: isinstance(node, Numbers | Sparse))


def _pruning(name: str, applied: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(isinstance(rule, FakeQuantise) for rule in applied[:-1]):
        raise ValueError(f"{name}: quantisation must be the last of its rules")
    return tuple(rule for rule in applied if not isinstance(rule, FakeQuantise))


def _numbers(value: Tensor, rule: FakeQuantise) -> Numbers:
    levels = rule.levels(value)
    rows = levels.numbers
    about = (tuple(value.shape), value.dtype, rule.bits, rows.shape[1])
    shift = 2 ** (rule.bits - 1) if rule.symmetric else 0
    flat = (rows.to(torch.int16) + shift).to(torch.uint8).reshape(-1)
    if rule.bits <= 4:
        low, high = torch.nn.functional.pad(flat, (0, len(flat) % 2)).view(-1, 2).unbind(1)
        flat = low | (high << 4)
    return Numbers(flat, levels.scales, None if rule.symmetric else levels.zeros, about)


def _unpacked(node: Any) -> Any:
    if isinstance(node, Sparse):
        numel = math.prod(node.shape)
        bits = numpy.unpackbits(node.mask.numpy(), count=numel)
        flat = node.values.new_zeros(numel)
        flat[torch.from_numpy(bits).bool()] = node.values
        return flat.view(node.shape)
    if not isinstance(node, Numbers):
        return node
    shape, dtype, bits, width = node.about
    flat = node.numbers
    if bits <= 4:
        flat = torch.stack([flat & 15, flat >> 4], 1).reshape(-1)
    rows = flat[: len(node.scales) * width].view(-1, width).to(torch.int16)
    if node.zeros is None:
        rows, zeros = rows - 2 ** (bits - 1), torch.zeros_like(node.scales)
    else:
        zeros = node.zeros
    return Levels(rows, node.scales, zeros, shape).values(dtype)


def _bits(marks: Tensor) -> Tensor:
    return torch.from_numpy(numpy.packbits(marks.numpy()))


def _to_numbers(about: Any, parts: Any) -> Numbers:
    numbers, scales, zeros = parts
    return Numbers(numbers, scales, zeros, about)


def _to_sparse(shape: tuple[int, ...], parts: Any) -> Sparse:
    values, mask = parts
    return Sparse(values, mask, shape)


tree.register_node(
    Numbers,
    lambda x: ((x.numbers, x.scales, x.zeros), x.about, ("numbers", "scales", "zeros")),
    _to_numbers,
    path_entry_type=optree.GetAttrEntry,
)
tree.register_node(
    Sparse,
    lambda x: ((x.values, x.mask), x.shape, ("values", "mask")),
    _to_sparse,
    path_entry_type=optree.GetAttrEntry,
)
