"""remat: compute the inside of a function again in the backward pass instead of keeping it.

The wrapper only marks what is traced inside a call as one region, and `name` only marks a value.
What to keep and where to compute again is decided on the whole program by `zfunc.passes.remat`; so
closures over parameters, nested calls and random numbers need no care here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zfunc.errors import explain
from zfunc.policy import Budget, Matmuls, Names, Nothing, Policy
from zfunc.replay import noting_and_replaying
from zfunc.scope import scope

__all__ = ["name", "policies", "remat"]

P = ParamSpec("P")
R = TypeVar("R")


class policies:
    """What a rematerialised call keeps besides its arguments and what it returns.

    Attributes:
        nothing: nothing.
        matmuls: the results of matrix products, convolutions and attention: what costs arithmetic
            to compute again; the rest costs a pass over memory.
    """

    nothing: Final = Nothing()
    matmuls: Final = Matmuls()

    @staticmethod
    def names(*names: str) -> Names:
        """Keeps the values that `name` gave one of these names, and nothing else.

        Raises:
            ValueError: there is none, or one is not a string.

        Example:
            >>> policies.names("attention", "mlp")
            Names(names=('attention', 'mlp'))
        """
        return Names(names)

    @staticmethod
    def budget(nbytes: int) -> Budget:
        """Keeps at most `nbytes` bytes of each call, so that computing the rest again costs least.

        The choice is a minimum cut through the graph of the call (as in He 2022, "Min-cut
        optimal(*) recomputation") that weighs kept bytes against seconds, at the price of a byte at
        which the budget is used up. Seconds are those of the cost model: arithmetic, memory
        traffic, and gathers of leaves which nothing but a recomputation needs in the backward
        pass. The result of a collective counts as kept if the backward pass needs it; what depends
        on parameters alone counts in `Prefetch(live_bytes=)` instead.

        Args:
            nbytes: bytes of storages; what is computed again is alive besides, from there to its
                last use.

        Raises:
            LayoutError: not a whole number of 0 or more.

        Example:
            >>> policies.budget(50_000_000)
            Budget(nbytes=50000000)
        """
        return Budget(nbytes)


def remat(fn: Callable[P, R], policy: Policy = policies.nothing) -> Callable[P, R]:
    """Wraps a function so that its intermediate values are computed again in the backward pass.

    Inside a function given to `shard`, `spmd` or `infer` every call is a region of its own: only
    its arguments, the parameters it closes over, its results and what the policy names stay alive
    until the backward pass needs the rest. Calls may nest: with n blocks in groups of sqrt(n), each
    block and each group wrapped, about 2 sqrt(n) block inputs are alive at once (Chen et al. 2016,
    "Training deep nets with sublinear memory cost", section 4); a policy speaks of its own call, so
    that what an inner call keeps is computed again where the outer one does not keep it. Random
    numbers repeat exactly; a collective is never repeated, its result is kept.

    On the dynamic rung it is `torch.utils.checkpoint`, which keeps nothing whatever the policy;
    there numbers of Generators of the function's own, numpy and Python repeat too. Elsewhere the
    function runs as it is.

    Args:
        fn: any function, of trees and with keyword arguments.
        policy: what to keep, one of `policies`.

    Returns:
        A function with the same signature and the same results, bit for bit.

    Raises:
        ValueError: the policy is not one of `policies`.
        BudgetError: (where the function is captured) a budget that no choice can keep, because the
            backward pass needs what cannot be computed again: results of collectives, values
            whose sources are overwritten. Names the smallest feasible one.

    Example:
        >>> import torch
        >>> block = remat(lambda x, *, w: torch.tanh(x @ w), policies.matmuls)
        >>> block(torch.zeros(2, 3), w=torch.ones(3, 3)).sum().item()
        0.0
    """
    if not isinstance(policy, Policy):
        expected = "policies.nothing, .matmuls, .names(...) or .budget(...)"
        got = repr(policy)
        raise ValueError(explain("remat: unknown policy", expected=expected, got=got))

    @functools.wraps(fn, updated=())
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        current = scope()
        if current is None:
            return fn(*args, **kwargs)
        if not current.traced:
            replay = noting_and_replaying
            return checkpoint(fn, *args, use_reentrant=False, context_fn=replay, **kwargs)
        with current.region(policy):
            return fn(*args, **kwargs)

    return wrapped


def name(x: Tensor, label: str) -> Tensor:
    """Gives a value a name that `policies.names` can speak of.

    A name belongs to the storage: views of the value, and what is written into it, go with it.
    Outside of a capture, and on the dynamic rung, it does nothing.

    Args:
        x: any tensor.
        label: the name; many values may share one.

    Returns:
        The same tensor.

    Raises:
        ValueError: the label is not a string.

    Example:
        >>> import torch
        >>> def block(x, w):
        ...     return torch.tanh(name(x @ w, "product"))
        >>> kept = remat(block, policies.names("product"))
    """
    if not isinstance(label, str):
        raise ValueError(explain("name: the label", expected="a string", got=repr(label)))
    current = scope()
    if current is None or not current.traced:
        return x
    with current.named(label):
        return torch.ops.aten.alias.default(x)
