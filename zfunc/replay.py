"""Replay: a function that is called again draws the same numbers, whatever it draws them from.

`torch.utils.checkpoint` repeats the numbers of torch's default generators alone. Those of numpy's
and Python's are repeated by noting their states before the first call, those of a Generator of the
function's own by noting its state at its first use.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

__all__ = ["noting_and_replaying"]

Restore = Callable[[], object]


def noting_and_replaying() -> tuple[
    contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[None]
]:
    """The contexts of the first call and of the second, as `checkpoint(context_fn=)` takes them.

    The second call leaves every generator as it finds it.

    Example:
        >>> first, second = noting_and_replaying()
        >>> generator = torch.Generator().manual_seed(0)
        >>> with first:
        ...     x = torch.rand(3, generator=generator)
        >>> with second:
        ...     y = torch.rand(3, generator=generator)
        >>> torch.equal(x, y), torch.equal(x, torch.rand(3, generator=generator))
        (True, False)
    """
    noted: dict[Any, Restore] = {}
    return _Noting(noted), _Replaying(noted)


class _Noting(TorchFunctionMode):
    """Notes how to bring every generator back to where it is before its first use."""

    def __init__(self, noted: dict[Any, Restore]):
        super().__init__()
        self._noted = noted

    def __enter__(self) -> Any:
        self._noted.update({each: _restore(each) for each in (numpy.random, random)})
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.Generator) and argument not in self._noted:
                self._noted[argument] = _restore(argument)
        return func(*args, **kwargs)


class _Replaying:
    """Brings every generator back for as long as it is entered.

    A block is computed again as often as gradients are taken through it, and within itself where
    blocks nest.
    """

    def __init__(self, noted: dict[Any, Restore]):
        self._noted = noted
        self._after: list[list[Restore]] = []

    def __enter__(self) -> None:
        self._after.append([_restore(source) for source in self._noted])
        for restore in self._noted.values():
            restore()

    def __exit__(self, *_: object) -> None:
        for restore in self._after.pop():
            restore()


def _restore(source: Any) -> Restore:
    """What brings a generator back to the state that it is in."""
    if source is random:
        state = random.getstate()
        return lambda: random.setstate(state)
    state = source.get_state()
    return lambda: source.set_state(state)
