"""Generators: random numbers that a graph would repeat, or draw elsewhere than the function did.

Operators on fake tensors draw nothing, so the global generators must be afterwards what they were
before, and every operator that draws must have found the state that the whole function found.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch

from zfunc.capture import refusals

__all__ = ["Draws", "without_moving"]

T = TypeVar("T")


class Draws:
    """What is asked at every operator that draws while a function is traced.

    Args:
        own: whether the function may draw from generators of its own: one that is run once.
    """

    def __init__(self, *, own: bool):
        self._own = own
        self._seen: list[tuple[torch.Generator, bytes, object, str]] = []

    def __call__(self, op: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes the state that an operator draws from.

        Raises:
            CaptureError: it draws from a generator of the function's own.
        """
        line = refusals.line_of_stack()
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
        if given and not self._own:
            raise refusals.own_draw(op, line)
        generator = given[0] if given else torch.default_generator
        self._seen.append((generator, _state(generator), op, line))

    def check(self) -> None:
        """Compares the states that were drawn from with those at the end.

        Raises:
            CaptureError: the function seeded a generator in between.
        """
        for generator, state, op, line in self._seen:
            if state != _state(generator):
                raise refusals.own_draw(op, line)


def without_moving(record: Callable[[], T]) -> T:
    """Calls a function that must leave the global generators as they are.

    Whatever happens, they are put back; if it moved one, it is called again to find the line.

    Raises:
        CaptureError: it moved a generator.
    """
    before = _states()
    try:
        made = record()
        moved = [name for name, state in _states().items() if state != before[name]]
        if not moved:
            return made
        _restore(before)
        with refusals.line_of_change(lambda: _states()[moved[0]]) as line:
            record()
    except BaseException:
        _restore(before)
        raise
    _restore(before)
    raise refusals.moved_generator(moved[0], line[0])


def _states() -> dict[str, Any]:
    kind, words, *rest = numpy.random.get_state(legacy=True)  # pyright: ignore
    return {
        "torch": _state(torch.default_generator),
        "numpy": (kind, words.tobytes(), *rest),  # pyright: ignore
        "random": random.getstate(),
    }


def _restore(states: dict[str, Any]) -> None:
    kind, words, *rest = states["numpy"]
    numpy.random.set_state((kind, numpy.frombuffer(words, numpy.uint32), *rest))
    random.setstate(states["random"])
    state = torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8)
    torch.default_generator.set_state(state)


def _state(generator: torch.Generator) -> bytes:
    # By address: inside of a trace, methods of tensors are traced.
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())
