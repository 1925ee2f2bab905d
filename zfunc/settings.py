"""Settings that a user makes once: byte budgets, how to capture, and what `shard` was told."""

from __future__ import annotations

import dataclasses
from typing import Any

from zfunc.errors import LayoutError, check_count, explain
from zfunc.scaling import LossScale

__all__ = ["Capture", "Options", "Prefetch", "check_capture"]


@dataclasses.dataclass(frozen=True, slots=True)
class Prefetch:
    """Byte budgets of one rank.

    Attributes:
        live_bytes: the most that gathered copies, values derived from parameters alone, full
            gradients awaiting reduce and receive buffers may occupy together. None: a quarter of
            `Hardware.device_bytes`, or what the program needs if that is more.
        ahead_bytes: the most that is gathered before it is needed. None: twice the largest gather.

    Example:
        >>> Prefetch(live_bytes=100_000_000)
        Prefetch(live_bytes=100000000, ahead_bytes=None)
    """

    live_bytes: int | None = None
    ahead_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("live_bytes", "ahead_bytes"):
            value = getattr(self, name)
            if value is not None:
                check_count(f"Prefetch({name}=)", value, 0, "bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """How a function is captured.

    Attributes:
        rung: "traced", "dynamic", or "auto": traced, and dynamic where that is refused.
        check_every: trace again at every so many calls of a signature and compare; 0 never.
        max_signatures: how many programs are kept.
        max_shape_misses: after so many signatures of one parameter tree "auto" goes dynamic, if
            the function has no collectives of its own and all that it needs whole fits.

    Example:
        >>> Capture("traced", check_every=100).check_every
        100
    """

    rung: str = "auto"
    check_every: int = 0
    max_signatures: int = 64
    max_shape_misses: int = 32

    def __post_init__(self) -> None:
        for name, least in (("check_every", 0), ("max_signatures", 1), ("max_shape_misses", 1)):
            check_count(f"Capture({name}=)", getattr(self, name), least, "calls or programs")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What `shard` was called with, besides the loss and the mesh."""

    specs: Any
    trainable: Any
    precision: Any
    accum: int
    has_aux: bool
    nonfinite: str
    donate: bool
    loss_scale: LossScale | float | None = None


def check_capture(capture: Capture | str) -> Capture:
    """Completes `shard(capture=)`.

    Raises:
        LayoutError: no such rung.
    """
    made = Capture(capture) if isinstance(capture, str) else capture
    if not isinstance(made, Capture) or made.rung not in ("auto", "traced", "dynamic"):
        raise LayoutError(
            explain(
                f"capture={capture!r}",
                expected="'auto', 'traced', 'dynamic' or Capture(...)",
                do="leave it out to trace, and to call what cannot be traced",
            )
        )
    return made
