"""In-place arithmetic on lists of local tensors, cheap for a thousand tiny ones.

Every operation rounds once, to the dtype of the tensor that it writes, with no fused multiply-add:
an element's result does not depend on its place in the tensor, so pieces of a leaf come out bit for
bit as the whole leaf would.
"""
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc import tree
from zfunc.sharded import Sharded, is_sharded

__all__ = [
    "add_",
    "add_scaled_",
    "as_real",
    "batches",
    "copy_",
    "count_up_",
    "new_count",
    "put_piece_",
    "scale_",
    "scaled",
    "tensors_of",
]

_BATCH_NUMEL = 1 << 21
_EXACT = (torch.float32, torch.float64)


def tensors_of(nodes: Any) -> list[Tensor]:
    """Lists the local tensor of every leaf: `tree.leaves`, at half its cost for `Sharded` nodes."""
    leaves = tree.leaves(nodes, is_leaf=is_sharded)
    return [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in leaves]


def batches(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Cuts a list into slices of bounded size, so that temporaries stay small."""
    start = size = 0
    for stop, tensor in enumerate(tensors):
        if size and size + tensor.numel() > _BATCH_NUMEL:
            yield slice(start, stop)
            start, size = stop, 0
        size += tensor.numel()
    if tensors:
        yield slice(start, len(tensors))


def as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views complex tensors as pairs of reals, torch's convention for element-wise optimizers."""
    return [torch.view_as_real(x) if x.is_complex() else x for x in tensors]


def scale_(tensors: Sequence[Tensor], factor: float | Sequence[float]) -> None:
    """Multiplies every tensor by a number, or each by its own."""
    if not tensors:
        return
    factors = [factor] if isinstance(factor, (int, float)) else list(factor)
    one = _scalar(tensors, factors[0]) if len(set(factors)) == 1 else factors
    torch._foreach_mul_(list(tensors), one)


def scaled(tensors: Sequence[Tensor], factor: float) -> list[Tensor]:
    """Each tensor times a number."""
    return list(torch._foreach_mul(list(tensors), _scalar(tensors, factor))) if tensors else []


def add_(outs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Adds each tensor to its `out`."""
    if outs:
        torch._foreach_add_(list(outs), list(tensors))


def add_scaled_(outs: Sequence[Tensor], tensors: Sequence[Tensor], factor: float) -> None:
    """Adds `factor * tensor` to each `out`, in the dtype of `out`."""
    for batch in batches(outs):
        pairs = zip(outs[batch], tensors[batch], strict=True)
        add_(outs[batch], scaled([x.to(out.dtype) for out, x in pairs], factor))


def copy_(outs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copies each tensor into its `out`."""
    if outs:
        torch._foreach_copy_(list(outs), list(tensors))


def put_piece_(leaf: Any, whole: Tensor) -> None:
    """Writes this rank's piece of a whole leaf into the leaf, in the leaf's dtype."""
    if not isinstance(leaf, Sharded):
        leaf.copy_(whole)
        return
    start, stop = leaf.layout.range
    leaf.local.copy_(whole.reshape(-1)[start:stop].view(leaf.local.shape))


def new_count(*_: Any) -> Tensor:
    """A count of applied updates: a 0-d int64 CPU tensor."""
    return torch.zeros((), dtype=torch.int64)


def count_up_(counts: Any) -> list[int]:
    """Adds 1 to every count of a tree, and reads them all at once."""
    tensors = tensors_of(counts)
    if not tensors:
        return []
    torch._foreach_add_(tensors, 1)
    return torch.stack(tensors).tolist()


def _scalar(tensors: Sequence[Tensor], value: float) -> Any:
    """A 0-d tensor where it means the same as the number: a quarter of the cost for tiny leaves."""
    kinds = {(x.dtype, x.is_cpu) for x in tensors}
    dtype, is_cpu = next(iter(kinds))
    same = len(kinds) == 1 and is_cpu and dtype in _EXACT
    return torch.tensor(value, dtype=dtype) if same else value
