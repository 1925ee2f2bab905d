"""The optimizers by their usual names: short chains, with optax's names and torch's arithmetic."""

from __future__ import annotations

from zfunc.optim.base import Transform
from zfunc.optim.combine import chain
from zfunc.optim.masks import Mask
from zfunc.optim.moments import scale_by_adam, trace
from zfunc.optim.rates import Rate
from zfunc.optim.transforms import (
    add_decayed_weights,
    scale_by_learning_rate,
)

__all__ = ["adam", "adamw", "sgd"]


def sgd(learning_rate: Rate, momentum: float | None = None, *, nesterov: bool = False) -> Transform:
    """Gradient descent, with momentum if asked for: `torch.optim.SGD`.

        m = momentum * m + g         (the first time: g)
        p = p - lr * m               or, with nesterov: p - lr * (g + momentum * m)

    Args:
        learning_rate: lr, a number or a schedule.
        momentum: None or 0 for none.
        nesterov: whether to use Nesterov momentum.

    Returns:
        A chain of `trace` and `scale_by_learning_rate`.

    Raises:
        ValueError: nesterov without momentum, or a negative momentum.

    Example:
        >>> sgd(0.1)
        scale_by_learning_rate(learning_rate=0.1)
    """
    if not momentum:
        if nesterov:
            raise ValueError("nesterov=True looks ahead along the momentum: give momentum > 0")
        return scale_by_learning_rate(learning_rate)
    return chain(trace(momentum, nesterov), scale_by_learning_rate(learning_rate))


def adam(learning_rate: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transform:
    """Adam: `torch.optim.Adam` (equations at `scale_by_adam`).

    For its L2 penalty write `chain(add_decayed_weights(weight_decay), adam(...))`.

    Args:
        learning_rate: a number or a schedule.
        b1: the decay rate of the mean of gradients.
        b2: the decay rate of the mean of their squares.
        eps: added to the root.

    Returns:
        A chain of `scale_by_adam` and `scale_by_learning_rate`.

    Example:
        >>> from zfunc import optim
        >>> adam(3e-4) == optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(3e-4))
        True
    """
    return chain(scale_by_adam(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adamw(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: Rate = 1e-2,
    mask: Mask | None = None,
) -> Transform:
    """Adam with decoupled weight decay: `torch.optim.AdamW`.

        p = p - lr * (adam direction + weight_decay * p)

    Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2; the decay is
    multiplied by the learning rate, and its default is torch's (optax has 1e-4).

    Args:
        learning_rate: lr, a number or a schedule.
        b1: the decay rate of the mean of gradients.
        b2: the decay rate of the mean of their squares.
        eps: added to the root.
        weight_decay: a number or a schedule.
        mask: which leaves decay, as for `add_decayed_weights`.

    Returns:
        A chain of `scale_by_adam`, `add_decayed_weights` and `scale_by_learning_rate`, which
        `optim.apply` runs in one pass over memory.

    Example:
        >>> tx = adamw(3e-4, mask=lambda path, shape: len(shape) > 1)
    """
    return chain(
        scale_by_adam(b1, b2, eps),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
