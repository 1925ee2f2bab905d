"""The scope of a capture: what library functions may ask for while a user's function is traced.

A context variable holds it, so that functions of lower layers (remat, gather) know whether a
capture is in progress without importing capture.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

from torch import Tensor

from zfunc.policy import Policy

__all__ = ["Scope", "entered", "scope"]


@dataclasses.dataclass(slots=True)
class Scope:
    """One capture in progress, or one call on the dynamic rung.

    Attributes:
        fulls: id of the piece of a `Sharded` argument -> the tensor that stands for all of it.
        annotate: tags everything traced inside with a region ("remat.3") or a name of a value
            ("name.mlp"); None where nothing is traced and the function runs as it is.
        policies: region -> what it keeps, of the regions entered so far.
    """

    fulls: dict[int, Tensor]
    annotate: Callable[[str], contextlib.AbstractContextManager[None]] | None
    policies: dict[str, Policy] = dataclasses.field(default_factory=dict)

    @property
    def traced(self) -> bool:
        """Whether a graph is being made."""
        return self.annotate is not None

    def region(self, policy: Policy) -> contextlib.AbstractContextManager[None]:
        """A region of its own for one call of a rematerialised function."""
        assert self.annotate is not None
        region = str(len(self.policies) + 1)
        self.policies[region] = policy
        return self.annotate(f"remat.{region}")

    def named(self, label: str) -> contextlib.AbstractContextManager[None]:
        """Gives what is traced inside a name."""
        assert self.annotate is not None
        return self.annotate(f"name.{label}")


_SCOPE: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("zfunc_scope", default=None)


def scope() -> Scope | None:
    """The scope of the capture in progress, or None."""
    return _SCOPE.get()


@contextlib.contextmanager
def entered(current: Scope) -> Iterator[Scope]:
    """Makes a scope the one of the capture in progress."""
    token = _SCOPE.set(current)
    try:
        yield current
    finally:
        _SCOPE.reset(token)
