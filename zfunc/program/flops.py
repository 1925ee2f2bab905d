"""FLOPs: multiplications and additions of the operators that dominate, by the shapes they get.

A product of [m, k] and [k, n] counts 2 m k n. Attention counts every pair of a query and a key,
masked or not, and its backward recomputes the scores. Everything else counts nothing: it is bound
by memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["operator_flops"]

Shape = tuple[int, ...]


def operator_flops(name: str, args: Sequence[Any], outs: Sequence[Shape | None]) -> int:
    """Counts one call.

    Args:
        name: the operator without its overload, such as "aten::mm".
        args: its positional arguments, with the shape (a tuple) in place of each tensor.
        outs: the shapes of its results, None for one that is not wanted.

    Returns:
        The count; 0 for an operator that is not in the table.

    Example:
        >>> operator_flops("aten::mm", [(2, 3), (3, 5)], [(2, 5)])
        60
    """
    formula = _FORMULAS.get(name)
    return 0 if formula is None else formula(args, outs)


def _product(left: int) -> Callable[[Sequence[Any], Sequence[Shape | None]], int]:
    """Matrix products; argument `left` is the left factor, its last dim is summed over."""

    def formula(args: Sequence[Any], outs: Sequence[Shape | None]) -> int:
        assert outs[0] is not None
        return 2 * math.prod(outs[0]) * args[left][-1]

    return formula


def _convolution(args: Sequence[Any], outs: Sequence[Shape | None]) -> int:
    assert outs[0] is not None
    return _convolve(args[0], args[1], outs[0], transposed=args[6])


def _convolution_backward(args: Sequence[Any], outs: Sequence[Shape | None]) -> int:
    grad, source, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return sum(map(bool, wanted[:2])) * _convolve(source, weight, grad, transposed=transposed)


def _convolve(source: Shape, weight: Shape, out: Shape, *, transposed: bool) -> int:
    """One multiplication and addition per weight and place that it is applied at."""
    places = source if transposed else out
    return 2 * math.prod(weight) * places[0] * math.prod(places[2:])


def _attention(args: Sequence[Any], outs: Sequence[Shape | None]) -> int:
    scores, values = _attention_products(*args[:3])
    return scores + values


def _attention_backward(args: Sequence[Any], outs: Sequence[Shape | None]) -> int:
    scores, values = _attention_products(*args[1:4])
    return 3 * scores + 2 * values


def _attention_products(query: Shape, key: Shape, value: Shape) -> tuple[int, int]:
    """The products of queries with keys, and of scores with values."""
    pairs = 2 * math.prod(query[:-1]) * key[-2]
    return pairs * query[-1], pairs * value[-1]


_FORMULAS: Mapping[str, Callable[[Sequence[Any], Sequence[Shape | None]], int]] = {
    "aten::mm": _product(0),
    "aten::addmm": _product(1),
    "aten::bmm": _product(0),
    "aten::baddbmm": _product(1),
    "aten::mv": _product(0),
    "aten::addmv": _product(1),
    "aten::dot": _product(0),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward,
}
