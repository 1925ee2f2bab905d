"""What a loss may return: a loss, or `(sum, weight)`; with aux a pair of that and any tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CaptureError, explain

__all__ = ["split_loss"]


def split_loss(out: Any, has_aux: bool) -> tuple[Tensor, Tensor | None, Any]:
    """Takes what a loss returned apart.

    Args:
        out: what it returned.
        has_aux: whether that should be a pair with aux.

    Returns:
        The loss [] (or the sum), the weight [] if there is one, and aux.

    Raises:
        CaptureError: it returned something else than a loss.
    """
    aux: Any = None
    if has_aux:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise _bad_loss("(loss, aux), since has_aux=True", out)
        out, aux = out
    weight: Tensor | None = None
    if isinstance(out, tuple):
        if len(out) != 2:
            raise _bad_loss("a loss, or (sum, weight)", out)
        out, raw = out
        if not hasattr(raw, "__float__"):
            raise _bad_loss("(sum, weight) with a number as weight", (out, raw))
        weight = raw if isinstance(raw, Tensor) else torch.full((), float(raw), dtype=torch.float64)
        if weight.numel() != 1 or weight.is_complex():
            raise _bad_loss("a weight of one element", weight)
        weight = weight.detach().reshape(())
    if not isinstance(out, Tensor) or out.dim() or not out.is_floating_point():
        raise _bad_loss("a 0-d floating tensor", out)
    return out, weight, aux


def _bad_loss(expected: str, out: Any) -> CaptureError:
    got = f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else repr(type(out))
    if isinstance(out, tuple):
        got = f"a tuple of {', '.join(type(part).__name__ for part in out) or 'nothing'}"
    return CaptureError(
        explain(
            "the loss returned something else than a loss",
            expected=expected,
            got=got,
            do="return loss.mean(), or (loss.sum(), weight); with has_aux=True a pair (loss, aux)",
        )
    )
