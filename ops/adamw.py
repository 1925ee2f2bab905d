"""AdamW in one pass over memory: unscale or clip, both moments, decay and update.

Writing each tensor once costs 28 bytes per float32 element; the same update as separate torch
operations moves several times as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from . import reference
from .backend import CODES, isa, native
from .checks import addresses, check_disjoint, check_same, check_threads

__all__ = ["adamw_"]

_WHERE = "adamw_"
_DTYPES = (torch.float32, torch.float64)
_Number = TypeVar("_Number", int, float)


def adamw_(
    params: Tensor | Sequence[Tensor],
    grads: Tensor | Sequence[Tensor],
    mu: Tensor | Sequence[Tensor],
    nu: Tensor | Sequence[Tensor],
    *,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float | Sequence[float],
    step: int | Sequence[int],
    grad_scale: float = 1.0,
    threads: int = 1,
) -> None:
    """Updates parameters and moments in place by AdamW with decoupled decay.

    The update is that of `torch.optim.AdamW` (Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", algorithm 2); the order of operations is fixed in `zfunc.ops.reference`. The
    result does not depend on `threads`, on the instruction set, or on how leaves are grouped.

    Args:
        params: one tensor, or a list of them: contiguous, float32 or float64, all of one dtype and
            device.
        grads: gradients of the same shapes.
        mu: first moments, of the same shapes.
        nu: second moments, of the same shapes.
        lr: learning rate.
        b1: decay rate of `mu`, in [0, 1).
        b2: decay rate of `nu`, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: one factor for all tensors, or one per tensor.
        step: number of updates, this one included: one for all tensors, or one per tensor.
        grad_scale: factor on the gradient (a clip factor, 1 / loss scale).
        threads: number of threads on a CPU.

    Raises:
        ValueError: an argument does not fit, or memory that is written overlaps another tensor.
            Nothing has been written then.

    Example:
        >>> import torch
        >>> from zfunc import ops
        >>> p, g, mu, nu = torch.ones(3), torch.ones(3), torch.zeros(3), torch.zeros(3)
        >>> ops.adamw_(p, g, mu, nu, lr=0.5, b1=0.9, b2=0.99, eps=0.0, weight_decay=0.0, step=1)
        >>> p
        tensor([0.5000, 0.5000, 0.5000])
    """
    named = {
        name: [x] if isinstance(x, Tensor) else x
        for name, x in (("params", params), ("grads", grads), ("mu", mu), ("nu", nu))
    }
    starts = [addresses(_WHERE, name, tensors) for name, tensors in named.items()]
    counts = check_same(_WHERE, named, _DTYPES)
    check_threads(_WHERE, threads)
    ps, gs, ms, vs = named.values()
    steps = _per_tensor("step", step, len(ps))
    decay = [lr * d for d in _per_tensor("weight_decay", weight_decay, len(ps))]
    scales = _bias_corrections(lr, b1, b2, eps, steps)
    step_size, nu_scale = [scales[t][0] for t in steps], [scales[t][1] for t in steps]
    if not ps:
        return
    item = ps[0].itemsize
    check_disjoint(_WHERE, named, starts, [n * item for n in counts], only_read="grads")
    module = native()
    if module is None or not ps[0].is_cpu:
        reference.adamw_(
            ps, gs, ms, vs, step_size=step_size, nu_scale=nu_scale, decay=decay,
            b1=b1, b2=b2, eps=eps, grad_scale=grad_scale,
        )  # fmt: skip
        return
    module.adamw(
        isa(), CODES[ps[0].dtype], *starts, counts, step_size, nu_scale, decay,
        b1, b2, eps, grad_scale, threads,
    )  # fmt: skip
    torch.autograd.graph.increment_version([*ps, *ms, *vs])


def _per_tensor(name: str, value: _Number | Sequence[_Number], n: int) -> list[_Number]:
    if isinstance(value, (int, float)):
        return [value] * n
    if len(value) != n:
        raise ValueError(f"{_WHERE}: number of values in {name}: expected {n}, got {len(value)}")
    return list(value)


def _bias_corrections(
    lr: float, b1: float, b2: float, eps: float, steps: Sequence[int]
) -> dict[int, tuple[float, float]]:
    for name, rate in (("b1", b1), ("b2", b2)):
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{_WHERE}: {name}: expected a rate in [0, 1), got {rate}")
    if not eps >= 0.0:
        raise ValueError(f"{_WHERE}: eps: expected a value of at least 0, got {eps}")
    scales: dict[int, tuple[float, float]] = {}
    for t in set(steps):
        if not isinstance(t, int) or t < 1:
            raise ValueError(f"{_WHERE}: step: expected an int of at least 1, got {t!r}")
        scales[t] = (lr / (1.0 - b1**t), 1.0 / math.sqrt(1.0 - b2**t))
    return scales
