"""The optimizers by their usual names: short chains, with optax's names and torch's arithmetic."""

from __future__ import annotations

import math

from zfunc.optim.base import Transform
from zfunc.optim.combine import chain
from zfunc.optim.masks import Mask
from zfunc.optim.moments import scale_by_adam, trace
from zfunc.optim.rates import Rate
from zfunc.optim.running import scale_by_lion, scale_by_rss
from zfunc.optim.transforms import (
    add_decayed_weights,
    scale_by_learning_rate,
)
from zfunc.optim.trust import scale_by_trust_ratio

__all__ = ["adagrad", "adam", "adamw", "lamb", "lion", "sgd"]


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


def lion(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: Rate = 1e-3,
    mask: Mask | None = None,
) -> Transform:
    """Lion: Adam's memory halved, every element moving by the learning rate.

        p = p - lr * (sign(b1 * mu + (1 - b1) * g) + weight_decay * p)

    Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2; names and
    defaults are optax's. The paper advises a learning rate 3 to 10 times smaller than AdamW's and a
    weight decay as much larger.

    Args:
        learning_rate: lr, a number or a schedule.
        b1: the share of the past in the direction.
        b2: the decay rate of the mean.
        weight_decay: a number or a schedule.
        mask: which leaves decay, as for `add_decayed_weights`.

    Returns:
        A chain of `scale_by_lion`, `add_decayed_weights` and `scale_by_learning_rate`.

    Raises:
        ValueError: a rate outside [0, 1).

    Example:
        >>> tx = lion(1e-4, weight_decay=0.1, mask=lambda path, shape: len(shape) > 1)
    """
    return chain(
        scale_by_lion(b1, b2),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def adagrad(
    learning_rate: Rate, initial_accumulator_value: float = 0.0, eps: float = 1e-10
) -> Transform:
    """Adagrad: `torch.optim.Adagrad` (equations and source at `scale_by_rss`).

    For torch's `lr_decay` give a schedule, `lambda count: lr / (1 + count * lr_decay)`; for its L2
    penalty write `chain(add_decayed_weights(weight_decay), adagrad(...))`.

    Args:
        learning_rate: a number or a schedule.
        initial_accumulator_value: where the sums of squares begin.
        eps: added to the root.

    Returns:
        A chain of `scale_by_rss` and `scale_by_learning_rate`.

    Raises:
        ValueError: a negative argument, or both 0.

    Example:
        >>> from zfunc import optim
        >>> adagrad(0.1) == optim.chain(optim.scale_by_rss(), optim.scale_by_learning_rate(0.1))
        True
    """
    return chain(
        scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(learning_rate)
    )


def lamb(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    min_coeff: float = 0.0,
    max_coeff: float = math.inf,
) -> Transform:
    """LAMB: AdamW's direction, scaled per leaf to the leaf's norm, for very large batches.

        p = p - lr * clip(|p| / |d|, min_coeff, max_coeff) * d
        d = adam direction + weight_decay * p

    You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    algorithm 2, with the identity for its phi; names and defaults are optax's. A leaf is one of the
    paper's layers; norms are of whole leaves over all ranks. DeepSpeed's Lamb has bounds of 0.01
    and 10.

    Args:
        learning_rate: lr, a number or a schedule.
        b1: the decay rate of the mean of gradients.
        b2: the decay rate of the mean of their squares.
        eps: added to the root.
        weight_decay: a number or a schedule.
        mask: which leaves decay, as for `add_decayed_weights`.
        min_coeff: the smallest ratio of norms.
        max_coeff: the largest ratio of norms.

    Returns:
        A chain of `scale_by_adam`, `add_decayed_weights`, `scale_by_trust_ratio` and
        `scale_by_learning_rate`.

    Raises:
        ValueError: a hyperparameter out of its range.

    Example:
        >>> tx = lamb(2e-3, weight_decay=0.01, min_coeff=0.01, max_coeff=10.0)
    """
    return chain(
        scale_by_adam(b1, b2, eps),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(min_coeff=min_coeff, max_coeff=max_coeff),
        scale_by_learning_rate(learning_rate),
    )
