"""Precision: in which dtype a leaf is stored, gathered, computed with and reduced.

Mixed precision as in Micikevicius et al. 2018 ("Mixed precision training", section 3), per leaf. A
leaf that is gathered is cast piece by piece before it travels; one that a rank holds whole anyway
is cast where it is used. Gradients travel in the dtype of the computation and are summed in
`reduce`: widening a term before it is sent would double the bytes and change no bit of the sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc import tree
from zfunc.capture.outputs import split_loss
from zfunc.errors import LayoutError, explain
from zfunc.layout import Dtypes
from zfunc.scaling import LossScale, check_scale
from zfunc.sharded import is_sharded

__all__ = ["Precision", "dtypes_of", "keeping_params", "loss_scale_of", "with_precision"]

_LOW = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one leaf, or of all; None keeps what is there. Only real floats are cast.

    Attributes:
        param: in which leaves are stored.
        compute: in which they are gathered, and what the function sees.
        reduce: in which gradients are summed over ranks and micro-batches, and handed to the
            optimizer.
        output: of the loss and of floating tensors in aux or in results.
        batch: of floating tensors in the batch.
        master: whether a leaf stored in bfloat16 or float16 has a float32 master in the optimizer's
            state, of which it is the cast. False updates it as it is, in float32 arithmetic.
        stochastic_rounding: whether a leaf stored in bfloat16 without a master is rounded up or
            down at random after an update, so that what is below half a unit is kept on average.
        loss_scale: a number, or a `LossScale` that adapts; for computation in float16.

    Example:
        >>> Precision.of("bf16").compute
        torch.bfloat16
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    batch: torch.dtype | None = None
    master: bool = True
    stochastic_rounding: bool = False
    loss_scale: LossScale | float | None = None

    def __post_init__(self) -> None:
        for name in ("param", "compute", "reduce", "output", "batch"):
            dtype = getattr(self, name)
            if dtype is None or (isinstance(dtype, torch.dtype) and _is_real(dtype)):
                continue
            raise LayoutError(
                explain(
                    f"Precision({name}={dtype!r})",
                    expected="a floating dtype of 16 bits or more, such as torch.bfloat16, or None",
                )
            )
        if not (self.loss_scale is None or isinstance(self.loss_scale, LossScale)):
            check_scale("Precision(loss_scale=)", self.loss_scale)
        if self.stochastic_rounding and self.master:
            raise LayoutError(
                explain(
                    "Precision(stochastic_rounding=True) with masters",
                    expected="master=False: a leaf that has a master is its nearest cast",
                )
            )

    @staticmethod
    def of(name: str) -> Precision:
        """The usual choice by name.

        Args:
            name: "fp32": everything in float32. "bf16": compute in bfloat16; reduce and output in
                float32, the leaves as they are (float32 leaves are their own masters). "fp16": the
                same in float16, with a dynamic loss scale.

        Returns:
            The precision.

        Raises:
            LayoutError: no such name.
        """
        if name == "fp32":
            full = torch.float32
            return Precision(param=full, compute=full, reduce=full, output=full, batch=full)
        if name == "bf16":
            return Precision(compute=torch.bfloat16, reduce=torch.float32, output=torch.float32)
        if name == "fp16":
            full, scale = torch.float32, LossScale()
            return Precision(compute=torch.float16, reduce=full, output=full, loss_scale=scale)
        raise LayoutError(
            explain(
                f"precision {name!r}",
                expected="'fp32', 'bf16', 'fp16' or Precision(...)",
                do="write Precision(compute=...) for other dtypes",
            )
        )


def dtypes_of(precision: Any, skeleton: Any, dtypes: Sequence[torch.dtype | None]) -> list[Dtypes]:
    """Completes `shard(precision=)` for every leaf.

    Args:
        precision: None, a name, a `Precision`, or a prefix tree of those.
        skeleton: the tree of the leaves.
        dtypes: the dtype of each leaf as given; None for one that is no tensor.

    Raises:
        LayoutError: a leaf of the prefix tree is none of those, or cannot be rounded at random.
        TreeMismatchError: it is not a prefix of the tree.
    """
    rows = tree.broadcast_prefix(
        _named(precision), skeleton, name="precision", is_prefix_leaf=_is_row
    )
    made: list[Dtypes] = []
    for row, dtype in zip(rows, dtypes, strict=True):
        if dtype is None or row is None or not _is_real(dtype):
            made.append(Dtypes.plain(dtype or torch.float32))
            continue
        stored = row.param or dtype
        master = row.master and stored in _LOW
        if row.stochastic_rounding and stored is torch.float16:
            raise LayoutError(
                explain(
                    "Precision(stochastic_rounding=True) of a leaf that is stored in float16",
                    expected="bfloat16",
                    do="use param=torch.bfloat16, or leave out stochastic_rounding",
                )
            )
        rounding = "stochastic" if row.stochastic_rounding else "nearest"
        if stored not in _LOW:
            rounding = ""
        made.append(Dtypes(stored, row.compute or stored, row.reduce, master, rounding))
    return made


def loss_scale_of(precision: Any) -> LossScale | float | None:
    """The scale that all rows of a prefix tree ask for.

    Raises:
        LayoutError: they disagree.
    """
    return _common(_named(precision), "loss_scale")


def keeping_params(precision: Any) -> Any:
    """The same precision for a function that stores nothing."""
    named = _named(precision)
    return tree.map(
        lambda row: row and dataclasses.replace(row, param=None), named, is_leaf=_is_row
    )


def with_precision(
    function: Callable[..., Any], precision: Any, *, loss: bool, has_aux: bool = False
) -> Callable[..., Any]:
    """The function that casts what it is given and what it returns.

    Args:
        function: of whole parameters and further arguments.
        precision: see `dtypes_of`.
        loss: whether it is a loss.
        has_aux: whether the loss returns aux.

    Raises:
        LayoutError: leaves of a prefix tree disagree about batch or output.
    """
    named = _named(precision)
    if all(row is None for row in tree.leaves(named, is_leaf=_is_row)):
        return function
    batch, output = _common(named, "batch"), _common(named, "output")

    @functools.wraps(function)
    def wrapped(params: Any, *args: Any, **kwargs: Any) -> Any:
        made = function(_cast_params(params, named), *_cast(args, batch), **kwargs)
        if not loss:
            return _cast(made, output)
        total, weight, aux = split_loss(made, has_aux)
        total = total if output is None else total.to(output)
        body = total if weight is None else (total, weight)
        return (body, _cast(aux, output)) if has_aux else body

    return wrapped


def _common(named: Any, field: str) -> Any:
    """What all rows have in one field."""
    rows = [row for row in tree.leaves(named, is_leaf=_is_row) if row is not None]
    found = {getattr(row, field) for row in rows}
    if len(found) > 1:
        raise LayoutError(
            explain(
                f"precision differs between leaves in {field}",
                expected="one value for all",
                got=sorted(map(str, found)),
                do=f"give every Precision of the tree the same {field}=",
            )
        )
    return found.pop() if found else None


def _cast_params(params: Any, named: Any) -> Any:
    leaves, structure = tree.flatten(params)
    rows = tree.broadcast_prefix(named, params, name="precision", is_prefix_leaf=_is_row)
    cast = [
        leaf if row is None or row.compute is None else _cast_leaf(leaf, row.compute)
        for leaf, row in zip(leaves, rows, strict=True)
    ]
    return tree.unflatten(structure, cast)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    return tree.map(lambda leaf: _cast_leaf(leaf, dtype), value, is_leaf=is_sharded)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor) and _is_real(leaf.dtype):
        return leaf.to(dtype)
    return leaf


def _named(precision: Any) -> Any:
    """Names completed, everything else checked."""

    def complete(row: Any) -> Precision | None:
        if isinstance(row, str):
            return Precision.of(row)
        if row is None or isinstance(row, Precision):
            return row
        raise LayoutError(
            explain(
                f"precision has {row!r}",
                expected="None, 'fp32', 'bf16', 'fp16' or Precision(...)",
            )
        )

    return tree.map(complete, precision, is_leaf=_is_row)


def _is_row(row: Any) -> bool:
    return row is None or isinstance(row, Precision)


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1
