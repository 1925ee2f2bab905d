"""One pass over a list of tensors: sums of squares for a global norm, and a test for NaN.

A norm over ranks must not depend on who computes it: squares are added in float64, in one order
that is written down in `zfunc.ops.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .backend import CODES, isa, native
from .checks import addresses, check_threads

__all__ = ["all_finite", "nonfinite", "sum_squares"]


def _readable(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The tensors as a kernel reads them, complex ones as pairs; None if the reference must run."""
    if not any(map(Tensor.is_complex, tensors)):
        views = list(tensors)
    else:
        views = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors]
    fits = all(x.dtype in CODES and x.is_contiguous() and x.device.type == "cpu" for x in views)
    return views if fits else None


def sum_squares(tensors: Sequence[Tensor], *, threads: int = 1) -> Tensor:
    """Sum of squares of each tensor, accumulated in float64.

    NaN and infinity propagate. The squares of finite float32, float16 and bfloat16 values never
    overflow, so for these dtypes a sum is finite exactly if its tensor is.

    Args:
        tensors: tensors of any shape on one device. Contiguous CPU tensors of float32, float64,
            float16, bfloat16 and complex dtypes go to the compiled kernel, others to torch.
        threads: number of threads on a CPU; the result does not depend on it.

    Returns:
        float64 of shape `[len(tensors)]`, on the device of the tensors.

    Raises:
        ValueError: `tensors` is no list of tensors of one device.

    Example:
        >>> import torch
        >>> from zfunc import ops
        >>> ops.sum_squares([torch.tensor([3.0, 4.0]), torch.ones(2, 2)])
        tensor([25.,  4.], dtype=torch.float64)
    """
    addresses("sum_squares", "tensors", tensors)
    check_threads("sum_squares", threads)
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"sum_squares: tensors: expected one device, got {found}")
    module = native()
    views = _readable(tensors) if module is not None else None
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if module is None or views is None:
        return torch.stack(reference.sum_squares(tensors))
    out = torch.empty(len(views), dtype=torch.float64)
    dtypes = [CODES[x.dtype] for x in views]
    starts, counts = list(map(Tensor.data_ptr, views)), list(map(Tensor.numel, views))
    module.sum_squares(isa(), dtypes, starts, counts, out.data_ptr(), threads)
    return out


def nonfinite(tensors: Sequence[Tensor], *, threads: int = 1) -> bool:
    """Whether any element of any tensor is NaN or infinite.

    Args:
        tensors: tensors of any dtype; integers are finite.
        threads: number of threads on a CPU.

    Raises:
        ValueError: `tensors` is no list of tensors.

    Example:
        >>> import torch
        >>> from zfunc import ops
        >>> ops.nonfinite([torch.zeros(2), torch.tensor([1.0, float("inf")])])
        True
    """
    addresses("nonfinite", "tensors", tensors)
    check_threads("nonfinite", threads)
    floating = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    module = native()
    views = _readable(floating) if module is not None else None
    if module is None or views is None:
        return reference.nonfinite(floating)
    dtypes = [CODES[x.dtype] for x in views]
    starts, counts = list(map(Tensor.data_ptr, views)), list(map(Tensor.numel, views))
    return module.nonfinite(isa(), dtypes, starts, counts, threads)


def all_finite(tensors: Sequence[Tensor], *, threads: int = 1) -> bool:
    """Whether no element of any tensor is NaN or infinite: `not nonfinite(tensors)`."""
    return not nonfinite(tensors, threads=threads)
