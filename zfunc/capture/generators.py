"""Generators: random numbers that a graph would repeat, or draw elsewhere than the function did.

Operators on fake tensors draw nothing, so the global generators must be afterwards what they were
before. Every operator that draws leaves a mark in its generator; the next one must find it, or else
the function has seeded the generator in between, which a graph cannot do.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch

from zfunc.capture import refusals
from zfunc.errors import CaptureError
from zfunc.program.ir import is_draw

__all__ = ["Draws", "without_moving"]

T = TypeVar("T")
_MARK = 0x5EED << 40


class Draws:
    """What is asked at every operator that draws while a function is traced; a context.

    Args:
        own: whether the function may draw from generators of its own: one that is run once, right
            after. They are then in the state that the first draw has found.
    """

    def __init__(self, *, own: bool):
        self._own = own
        self._found: dict[torch.Generator, bytes] = {}
        self._expected: dict[torch.Generator, bytes] = {}
        self._marks: set[int] = set()
        self._last: tuple[object, str] = ("", "")
        self._count = 0
        self._seeded: CaptureError | None = None

    def __enter__(self) -> Draws:
        if not self._own:
            self._expected[torch.default_generator] = _state(torch.default_generator)
        return self

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Looks at the state that an operator draws from.

        Raises:
            CaptureError: it draws from a generator of the function's own.
        """
        if not is_draw(op, args, kwargs):
            return
        self._last = op, refusals.line_of_stack()
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
        if given and not self._own:
            raise refusals.own_draw(*self._last)
        generator = given[0] if given else torch.default_generator
        self._look(generator)
        self._found.setdefault(generator, _state(generator))
        self._count += 1
        generator.manual_seed(_MARK + self._count)
        self._expected[generator] = _state(generator)
        self._marks.add(hash(self._expected[generator]))

    def __exit__(self, *_: Any) -> None:
        for generator, state in self._found.items():
            self._look(generator)
            if hash(_state(generator)) in self._marks:
                _set_state(generator, state)

    def check(self) -> None:
        """Afterwards: raises `CaptureError` if the function seeded a generator between draws."""
        if self._seeded is not None:
            raise self._seeded

    def _look(self, generator: torch.Generator) -> None:
        state = _state(generator)
        if self._expected.get(generator, state) != state and self._seeded is None:
            self._seeded = refusals.own_draw(*self._last)


def without_moving(record: Callable[[Draws | None], T]) -> T:
    """Calls a function that must leave the global generators as they are.

    Whatever happens, they are put back; if it moved one, it is called again to find the line.

    Args:
        record: called with what is to be asked at every draw.

    Raises:
        CaptureError: it moved a generator, or seeded one between draws.
    """
    before = _states()
    try:
        with Draws(own=False) as draws:
            made = record(draws)
        moved = [name for name, state in _states().items() if state != before[name]]
        if not moved:
            draws.check()
            return made
        _restore(before)
        with refusals.line_of_change(lambda: _states()[moved[0]]) as line:
            record(None)
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
    _set_state(torch.default_generator, states["torch"])


def _state(generator: torch.Generator) -> bytes:
    # By address: inside of a trace, methods of tensors are traced.
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _set_state(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
