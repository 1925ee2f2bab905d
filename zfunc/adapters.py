"""LoRA: a frozen base, and for some of its leaves a trained difference of low rank.

`lora` takes a pure function of parameters and makes one of a base and factors: each adapted leaf is
used as `base + alpha / rank * a @ b` (Hu et al. 2022, "LoRA", section 4.1). It is nothing but a
function of the tree: the base has no gradient, no optimizer state and no reduce because it is
frozen, and with a base in eight bits it is gathered in eight bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc import random, tree
from zfunc.errors import LayoutError, explain
from zfunc.quantised import Quantised, dequantise, quantise

__all__ = ["Adapted", "lora"]


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A function of a base and factors; made by `lora`.

    Attributes:
        apply_fn: the function of whole parameters.
        scales: alpha / rank of each adapted leaf, by its path.
    """

    apply_fn: Callable[..., Any]
    scales: Mapping[str, float]

    @property
    def trainable(self) -> dict[str, bool]:
        """For `zfunc.shard(..., trainable=)`: the factors train, the base does not."""
        return {"base": False, "factors": True}

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with the merged parameters."""
        return self.apply_fn(self.merge(params), *args, **kwargs)

    def merge(self, params: Any) -> Any:
        """The parameters of the function itself: differentiable, for export, or in a loss.

        Args:
            params: `{"base": ..., "factors": ...}` of whole tensors.
        """
        return self._added(params["base"], params["factors"], 1.0)

    def unmerge(self, merged: Any, params: Any) -> Any:
        """The base again, from merged parameters: off by roundings of the sum."""
        return self._added(merged, params["factors"], -1.0)

    def _added(self, base: Any, factors: Any, sign: float) -> Any:
        def add(path: tuple[Any, ...], leaf: Any) -> Any:
            whole, name = dequantise(leaf), tree.glob_path(path)
            if name not in self.scales:
                return whole
            a, b = factors[name]["a"], factors[name]["b"]
            change = (sign * self.scales[name]) * (a @ b).view(whole.shape)
            return (whole + change).to(whole.dtype)

        return tree.map_with_path(add, base, is_leaf=_is_quantised)


def lora(
    apply_fn: Callable[..., Any],
    params: Any,
    ranks: Mapping[str, int],
    *,
    key: Tensor,
    alpha: float | None = None,
    base: torch.dtype | str | None = None,
    block: int = 64,
) -> tuple[Adapted, dict[str, Any]]:
    """Adapts some leaves of a function's parameters by differences of low rank.

    A leaf [m, ...] is a matrix [m, n]; its factors are `a` [m, rank], zero at first, and `b`
    [rank, n], normal with variance 1 / n, so that training starts from the base. They are float32
    where the base is narrower. In a step the difference costs 2 m n rank operations a use.

    Args:
        apply_fn: `apply_fn(params, ...)`.
        params: its parameters, whole.
        ranks: glob of paths -> rank, as `zfunc.tree.label` reads globs; other leaves are frozen as
            they are.
        key: draws the factors.
        alpha: the factor of the differences, over the rank; by default the rank, which makes it 1.
        base: what the base is kept in: a dtype for its floating leaves, or "int8" for adapted
            leaves in blocks of eight bits (`zfunc.quantised`); None for as it is.
        block: how many elements of an 8-bit base share a scale.

    Returns:
        A function of `{"base": ..., "factors": {path: {"a": ..., "b": ...}}}`, and that tree.

    Raises:
        LayoutError: an adapted leaf is no matrix of real numbers.
        TreeMismatchError: a glob matches no leaf.
        ValueError: a rank below 1, an unknown `base`.

    Example:
        >>> import zfunc
        >>> params = {"w": torch.eye(3), "bias": torch.zeros(3)}
        >>> apply_fn, adapted = lora(lambda p, x: x @ p["w"] + p["bias"], params, {"w": 2},
        ...                          key=zfunc.random.key(0))
        >>> apply_fn(adapted, torch.ones(3))
        tensor([1., 1., 1.])
        >>> {name: tuple(x.shape) for name, x in adapted["factors"]["w"].items()}
        {'a': (3, 2), 'b': (2, 3)}
        >>> step = zfunc.shard(lambda p, x: apply_fn(p, x).sum(), zfunc.mesh(),
        ...                    trainable=apply_fn.trainable)
    """
    if not (base is None or base == "int8" or isinstance(base, torch.dtype)):
        raise ValueError(f"base={base!r} must be a dtype, 'int8' or None")
    scales: dict[str, float] = {}
    factors: dict[str, dict[str, Tensor]] = {}
    labels = tree.leaves(tree.label(params, {**ranks, **_rest(ranks)}))
    kept = []
    paths, leaves, structure = optree.tree_flatten_with_path(params, namespace=tree.NAMESPACE)
    for number, (path, leaf, rank) in enumerate(zip(paths, leaves, labels, strict=True)):
        name = tree.glob_path(path)
        if rank:
            own = random.fold_in(key, number)
            scales[name], factors[name] = _factors(leaf, name, rank, alpha, own)
        kept.append(_kept(leaf, base, block, adapted=bool(rank)))
    tree_of_base = tree.unflatten(structure, kept)
    return Adapted(apply_fn, scales), {"base": tree_of_base, "factors": factors}


def _rest(ranks: Mapping[str, int]) -> dict[str, int]:
    for glob, rank in ranks.items():
        if rank < 1:
            raise ValueError(f"the rank {rank} of {glob!r} must be 1 or more")
    return {} if "**" in ranks else {"**": 0}


def _factors(
    leaf: Any, name: str, rank: int, alpha: float | None, key: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """alpha / rank and the two factors of a leaf."""
    if not (isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim >= 2):
        raise LayoutError(
            explain(
                f"{name} cannot be adapted",
                expected="a floating tensor with two dims or more",
                got=f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf),
                do="name matrices only, by globs such as 'blocks/*/qkv'",
            )
        )
    rows, columns = leaf.shape[0], math.prod(leaf.shape[1:])
    dtype = torch.promote_types(leaf.dtype, torch.float32)
    b = random.normal(key, (rank, columns), dtype) / math.sqrt(max(columns, 1))
    factors = {"a": torch.zeros(rows, rank, dtype=dtype), "b": b}
    return (1.0 if alpha is None else alpha / rank), factors


def _kept(leaf: Any, base: torch.dtype | str | None, block: int, *, adapted: bool) -> Any:
    """A leaf of the base as it is kept."""
    if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
        return leaf
    if isinstance(base, torch.dtype):
        return leaf.detach().to(base)
    return quantise(leaf, block) if base == "int8" and adapted else leaf.detach()


def _is_quantised(node: Any) -> bool:
    return isinstance(node, Quantised)
