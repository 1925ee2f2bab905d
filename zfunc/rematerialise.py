"""remat: compute the inside of a function again in the backward pass instead of keeping it.

The wrapper only marks what is traced inside a call as one region. What to keep and where to compute
again is decided on the whole program by `zfunc.passes.remat`; so closures over parameters, nested
calls and random numbers need no care here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from torch.utils.checkpoint import checkpoint

from zfunc.errors import explain
from zfunc.scope import scope

__all__ = ["Nothing", "policies", "remat"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, slots=True)
class Nothing:
    """Keep nothing that a call makes but what it returns."""


class policies:
    """What a rematerialised call keeps.

    Attributes:
        nothing: nothing but what it returns.
    """

    nothing: Final = Nothing()


def remat(fn: Callable[P, R], policy: Nothing = policies.nothing) -> Callable[P, R]:
    """Wraps a function so that its intermediate values are computed again in the backward pass.

    Inside a function given to `shard`, `spmd` or `infer` every call is a region of its own: only
    its arguments, the parameters it closes over and its results stay alive until the backward pass
    needs the rest. Calls may nest: with n blocks in groups of sqrt(n), each block and each group
    wrapped, about 2 sqrt(n) block inputs are alive at once (Chen et al. 2016, "Training deep nets
    with sublinear memory cost", section 4). Random numbers repeat exactly; a collective is never
    repeated, its result is kept. On the dynamic rung it is `torch.utils.checkpoint`; elsewhere the
    function runs as it is.

    Args:
        fn: any function, of trees and with keyword arguments.
        policy: what to keep.

    Returns:
        A function with the same signature and the same results, bit for bit.

    Raises:
        ValueError: the policy is not one of `policies`.

    Example:
        >>> import torch
        >>> block = remat(lambda x, *, w: torch.tanh(x @ w))
        >>> block(torch.zeros(2, 3), w=torch.ones(3, 3)).sum().item()
        0.0
    """
    if not isinstance(policy, Nothing):
        got = repr(policy)
        raise ValueError(explain("remat: unknown policy", expected="policies.nothing", got=got))

    @functools.wraps(fn, updated=())
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        current = scope()
        if current is None:
            return fn(*args, **kwargs)
        if not current.traced:
            return checkpoint(fn, *args, use_reentrant=False, **kwargs)
        with current.region():
            return fn(*args, **kwargs)

    return wrapped
