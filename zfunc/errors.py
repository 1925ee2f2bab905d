"""Every exception that zfunc raises by its own name.

A message has one shape: what is wrong with which leaf, then `expected` and `got`, then one line on
what to do. `explain` builds it, so that all errors read alike.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CaptureError",
    "DonatedStateError",
    "LayoutError",
    "NonFiniteError",
    "ProgramMismatchError",
    "RankLostError",
    "RemoteRankError",
    "TreeMismatchError",
    "check_count",
    "explain",
]


class TreeMismatchError(ValueError):
    """Two trees that must have the same structure, or a prefix of it, do not."""


class LayoutError(ValueError):
    """A spec, mesh, dtype or device does not fit the leaf that it was given for."""


class BudgetError(ValueError):
    """A byte budget that no order of the program can keep.

    Attributes:
        needed_bytes: the smallest budget that is feasible.
        limit_bytes: the budget that was given.
        path: the leaf that decides it.
        op: the op that needs it, as text.
    """

    # The defaults serve pickle, which makes an error of its message and sets the rest afterwards.
    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int = 0,
        limit_bytes: int = 0,
        path: str = "",
        op: str = "",
    ):
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        self.path = path
        self.op = op


class DonatedStateError(RuntimeError):
    """A state was used after a step consumed its buffers."""


class CaptureError(RuntimeError):
    """The loss cannot be turned into a graph that would stay true.

    Attributes:
        runs_dynamic: whether the dynamic rung can run it as it is.
    """

    def __init__(self, message: str, *, runs_dynamic: bool = False):
        super().__init__(message)
        self.runs_dynamic = runs_dynamic


class ProgramMismatchError(RuntimeError):
    """Ranks hold programs or settings that differ where they must not."""


class NonFiniteError(ArithmeticError):
    """The loss or a reduced gradient is not finite and `nonfinite="raise"` was asked for."""


class RemoteRankError(RuntimeError):
    """Another rank failed; this rank stopped with it. The state from before the call is valid.

    Attributes:
        rank: the lowest rank that failed.
    """

    def __init__(self, message: str, *, rank: int = 0):
        super().__init__(message)
        self.rank = rank


class RankLostError(RuntimeError):
    """A rank died or did not answer in time. Terminal: go on from a checkpoint."""


def explain(problem: str, *, expected: object = None, got: object = None, do: str = "") -> str:
    """Builds the text of an error.

    Args:
        problem: one sentence that names the leaf or argument.
        expected: what would have been right.
        got: what was there instead.
        do: one line on what to do.

    Returns:
        The message, one fact a line.

    Example:
        >>> print(explain("params['w'] is on the wrong device", expected="cpu", got="cuda:0"))
        params['w'] is on the wrong device
          expected  cpu
          got       cuda:0
    """
    lines = [problem]
    if expected is not None:
        lines.append(f"  expected  {expected}")
    if got is not None:
        lines.append(f"  got       {got}")
    if do:
        lines.append(f"  {do}")
    return "\n".join(lines)


def check_count(name: str, value: object, least: int, unit: str) -> None:
    """Raises `LayoutError` unless a value is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LayoutError(
            explain(f"{name} is {value!r}", expected=f"a whole number of {unit}, {least} or more")
        )
