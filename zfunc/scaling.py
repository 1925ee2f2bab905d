"""Loss scaling: gradients that a narrow dtype would flush to zero are computed larger.

The derivative of the loss starts from the scale in place of one, and gradients are divided by it
before they are measured (Micikevicius et al. 2018, "Mixed precision training", section 3.2). A
dynamic scale grows while gradients stay finite and shrinks when they do not; it is a pure state
machine, and its state is a value in `State.scaler`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from zfunc.errors import LayoutError, NonFiniteError, check_count, explain

__all__ = [
    "LossScale",
    "Scaler",
    "advanced",
    "check_scale",
    "check_scaler",
    "fresh_scaler",
    "scale_of",
]


@dataclasses.dataclass(frozen=True, slots=True)
class LossScale:
    """A dynamic loss scale.

    A step whose loss or gradients are not finite is left out. The scale is halved by the first such
    step for which no patience is left, and doubled after `window` steps in a row that were applied.

    Attributes:
        initial_power: the scale starts at 2 to this power.
        window: applied steps in a row before the scale is doubled.
        hysteresis: the patience: how many steps in all are left out before the scale is halved.
        consecutive: whether every applied step restores the patience; else only a doubling does.
        minimum: the scale is never below.
        at_minimum: what a step does that is left out with the scale at its minimum and no patience:
            "raise" (`NonFiniteError`), or "stay".

    Example:
        >>> LossScale(window=500).initial_power
        16
    """

    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    at_minimum: str = "raise"

    def __post_init__(self) -> None:
        check_count("LossScale(window=)", self.window, 1, "steps")
        check_count("LossScale(hysteresis=)", self.hysteresis, 1, "steps")
        check_count("LossScale(initial_power=)", self.initial_power, 0, "doublings")
        check_scale("LossScale(minimum=)", self.minimum)
        if self.at_minimum not in ("raise", "stay"):
            raise LayoutError(
                explain(f"LossScale(at_minimum={self.at_minimum!r})", expected="'raise' or 'stay'")
            )


class Scaler(NamedTuple):
    """The state of a dynamic scale.

    Attributes:
        scale: float64, 0-d: of the next step.
        applied: int64, 0-d: steps applied since one was left out.
        patience: int64, 0-d: how many more steps are left out before the scale is halved.
    """

    scale: Tensor
    applied: Tensor
    patience: Tensor


def check_scale(name: str, value: object) -> None:
    """Raises `LayoutError` unless a value is a scale."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not (math.isfinite(number) and number > 0):
        raise LayoutError(explain(f"{name} is {value!r}", expected="a finite number above 0"))


def fresh_scaler(policy: LossScale | float | None) -> Scaler | None:
    """The state before the first step; None for a scale that does not change."""
    if not isinstance(policy, LossScale):
        return None
    scale = max(2.0**policy.initial_power, policy.minimum)
    return _scaler(scale, 0, policy.hysteresis)


def check_scaler(policy: LossScale | float | None, scaler: Scaler | None) -> None:
    """Raises `LayoutError` unless a state of a step belongs to its policy."""
    if isinstance(policy, LossScale) != isinstance(scaler, Scaler):
        raise LayoutError(
            explain(
                "the state's loss scale is not one of this step",
                expected="a state" if isinstance(policy, LossScale) else "none",
                got=scaler,
                do="bring states of other steps over with Step.adopt",
            )
        )


def scale_of(policy: LossScale | float | None, scaler: Scaler | None) -> float:
    """The scale of the next step; without a state a dynamic one is 1."""
    if not isinstance(policy, LossScale):
        return 1.0 if policy is None else float(policy)
    return 1.0 if scaler is None else float(scaler.scale)


def advanced(policy: LossScale, scaler: Scaler, *, finite: bool) -> Scaler:
    """The state after a step.

    Raises:
        NonFiniteError: the scale is at its minimum already, and the policy says so.
    """
    scale, applied, patience = (number.item() for number in scaler)
    if finite:
        if policy.consecutive:
            patience = policy.hysteresis
        if applied and applied % policy.window == 0:
            scale, patience = 2 * scale, policy.hysteresis
        return _scaler(scale, applied + 1, patience)
    if patience > 1:
        return _scaler(scale, 0, patience - 1)
    if scale <= policy.minimum and policy.at_minimum == "raise":
        raise NonFiniteError(
            explain(
                f"the loss scale is at its minimum of {policy.minimum:g}, and gradients are still"
                " not finite",
                do="the state from before is valid; look for what overflows, compute it in a wider"
                ' dtype, or set LossScale(at_minimum="stay")',
            )
        )
    return _scaler(max(scale / 2, policy.minimum), 0, patience)


def _scaler(scale: float, applied: float, patience: float) -> Scaler:
    return Scaler(
        torch.tensor(scale, dtype=torch.float64),
        torch.tensor(int(applied)),
        torch.tensor(int(patience)),
    )
