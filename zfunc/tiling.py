"""tiled: a function on one chunk of its arguments after the other, so that only one lives at once.

Each chunk is a `remat` region of its own: what a chunk makes dies with it in the forward pass and
is made again in the backward pass, chunk by chunk. The rest is what any sequence of regions gets:
weights are gathered once for neighbouring chunks where the budget allows, random numbers replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc import tree
from zfunc.errors import check_count, explain
from zfunc.rematerialise import remat
from zfunc.sharded import is_sharded

__all__ = ["tiled"]


def tiled(
    fn: Callable[..., Any],
    dim: int | Sequence[int | None],
    n: int,
    *,
    out: int | str | None = None,
) -> Callable[..., Any]:
    """Runs a function on `n` chunks, each a `remat` region, and puts the results together.

    For projections and losses whose intermediate values are huge: of the logits of a vocabulary,
    say, one n-th is alive at once, in forward and backward (as the tiled computations of ALST,
    Bekman et al. 2025, and of DeepSpeed's `TiledLinear`). Values and gradients are those of the
    whole function up to the order of sums, if it treats its rows alike.

        # hidden [tokens, width], weight [vocab, width], targets [tokens]
        total = tiled(lambda h, t, w: F.cross_entropy(h @ w.t(), t, reduction="sum"),
                      (0, 0, None), 16, out="sum")(hidden, targets, weight)
        # a projection by rows of its weight [out_features, in_features], and by columns
        y = tiled(F.linear, (None, 0), 4, out=-1)(x, weight)
        y = tiled(F.linear, (-1, 1), 4, out="sum")(x, weight)

    The gradient of a weight that every chunk reads whole is a sum: while a chunk's is added, three
    tensors of the weight's size are alive. Where that is more than the intermediate values, split
    the weight instead, as `tests/bench/remat.py` does with a vocabulary.

    Chunks run from the last to the first, so that the backward pass, which goes the other way, adds
    gradients of weights from the first to the last. Random numbers of torch's generator are drawn
    in that order; a key that is not split draws the same numbers in every chunk.

    Args:
        fn: a function of trees of tensors, to a tree of tensors.
        dim: the dim along which the first argument is split, every tensor of it; or one entry per
            positional argument, None for one that each chunk gets whole. Further positional
            arguments, those by keyword and what `fn` closes over are whole.
        n: chunks; their sizes differ by one at most, and none is empty if there are fewer than `n`
            elements.
        out: the dim along which results are concatenated, or "sum" where they are added, as for
            a loss that is a sum (not a mean). None: the first dim that is split.

    Returns:
        A function with the same signature.

    Raises:
        LayoutError: `n` is not a whole number of 1 or more.
        ValueError: no dim is given or `out` is neither a dim nor "sum"; (when called) tensors
            differ in size along their dims or lack them, results are no tensors, or have no dims
            to concatenate.

    Example:
        >>> import torch
        >>> double = tiled(lambda x: 2 * x, 0, 3)
        >>> double(torch.arange(4.0))
        tensor([0., 2., 4., 6.])
    """
    check_count("tiled(n=)", n, 1, "chunks")
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    split = [one for one in dims if one is not None]
    if not split or not all(isinstance(one, int) for one in split):
        raise ValueError(explain("tiled(dim=)", expected="a dim, or one per argument", got=dim))
    if out is not None and not isinstance(out, int) and out != "sum":
        raise ValueError(explain("tiled(out=)", expected="a dim or 'sum'", got=repr(out)))
    joined = split[0] if out is None else out
    part = remat(fn)

    @functools.wraps(fn, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chunks = _chunks(args, dims, n)
        results: list[Any] = []
        for chunk in reversed(chunks):
            result = part(*chunk, **kwargs)
            _check_results(result, joined)
            if joined == "sum" and results:
                result = tree.map(torch.add, results.pop(), result)
            results.append(result)
        if not isinstance(joined, int):
            return results[0]
        return tree.map(functools.partial(_joined, joined), *reversed(results))

    return wrapped


def _chunks(args: tuple[Any, ...], dims: tuple[int | None, ...], n: int) -> list[tuple[Any, ...]]:
    """The arguments of every chunk."""
    if len(args) < len(dims):
        raise ValueError(
            explain("tiled: too few arguments", expected=f"{len(dims)} or more", got=len(args))
        )
    size = _size(args, dims)
    num = max(1, min(n, size))
    sizes = [size // num + (place < size % num) for place in range(num)]
    columns = [
        [arg] * num if dim is None else _split(arg, dim, sizes)
        for arg, dim in zip(args, (*dims, *[None] * (len(args) - len(dims))), strict=True)
    ]
    return list(zip(*columns, strict=True))


def _size(args: tuple[Any, ...], dims: tuple[int | None, ...]) -> int:
    """The size that is split, the same in every tensor."""
    found: dict[str, int] = {}
    for number, (arg, dim) in enumerate(zip(args, dims, strict=False)):
        if dim is None:
            continue
        leaves = tree.leaves(arg, is_leaf=is_sharded)
        paths = tree.leaf_paths(arg, f"args[{number}]", is_leaf=is_sharded)
        for path, leaf in zip(paths, leaves, strict=True):
            if is_sharded(leaf):
                raise ValueError(
                    explain(f"tiled: {path} is in pieces", do="split zfunc.gather(...) of it")
                )
            if isinstance(leaf, Tensor):
                if not _has(leaf, dim):
                    shape = tuple(leaf.shape)
                    raise ValueError(explain(f"tiled: {path} has no dim {dim}", got=shape))
                found[path] = leaf.shape[dim]
    if len(set(found.values())) != 1:
        raise ValueError(
            explain("tiled: sizes to split", expected="tensors of one size", got=found or "none")
        )
    return next(iter(found.values()))


def _split(arg: Any, dim: int, sizes: list[int]) -> list[Any]:
    """One tree per chunk; what is no tensor is in each of them."""
    leaves, structure = tree.flatten(arg)
    columns = [
        leaf.split(sizes, dim) if isinstance(leaf, Tensor) else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [tree.unflatten(structure, [column[k] for column in columns]) for k in range(len(sizes))]


def _check_results(result: Any, joined: int | str) -> None:
    """Refuses what cannot be put together."""
    for leaf in tree.leaves(result):
        if not isinstance(leaf, Tensor) or (joined != "sum" and not _has(leaf, joined)):
            raise ValueError(
                explain(
                    "tiled: a result that cannot be put together",
                    expected="tensors" if joined == "sum" else f"tensors with a dim {joined}",
                    got=f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf),
                    do="out='sum' adds results up, such as a loss that is a sum",
                )
            )


def _joined(dim: int, *parts: Tensor) -> Tensor:
    return torch.cat(parts, dim)


def _has(leaf: Tensor, dim: Any) -> bool:
    return -leaf.dim() <= dim < leaf.dim()
