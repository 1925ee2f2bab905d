"""The global generators of torch (CPU), numpy and `random`, one state per virtual rank.

numpy takes 40 us to read or write the state of its Mersenne twister. So each rank has a bit
generator of its own that is swapped in by reference, and numpy reads and writes only what it keeps
beside it, the second value of a normal pair.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

__all__ = ["Generators", "generators_kept"]


class Generators:
    """The generator states of one rank; a copy of the current ones at first."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        state = np.random.get_state(legacy=False)
        self._bits = _swappable(type(mtrand.get_bit_generator()))()
        self._bits.state = state
        self._numpy: Any = state

    def enter(self) -> None:
        """Makes this rank's states the global ones."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        mtrand.set_bit_generator(self._bits)
        with _light(self._bits):
            np.random.set_state(self._numpy)

    def leave(self) -> None:
        """Keeps the global states as this rank's."""
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._bits = mtrand.get_bit_generator()
        with _light(self._bits):
            self._numpy = np.random.get_state(legacy=False)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Gives the global generators their present states back at the end."""
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    bits = mtrand.get_bit_generator()
    numpy_state = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        mtrand.set_bit_generator(bits)
        np.random.set_state(numpy_state)


def _swappable(base: Any) -> Any:
    """Makes a kind of bit generator whose state numpy can be kept from reading and writing."""
    if hasattr(base, "light"):
        return base

    def read(self: Any) -> Any:
        blank = {"bit_generator": base.__name__, "state": None}
        return blank if self.light else base.state.__get__(self)

    def write(self: Any, state: Any) -> None:
        if not self.light:
            base.state.__set__(self, state)

    # numpy accepts a state only for a bit generator whose class has the name in the state.
    return type(base.__name__, (base,), {"light": False, "state": property(read, write)})


@contextmanager
def _light(bits: Any) -> Iterator[None]:
    """Keeps numpy from the state of a swappable bit generator; any other is read in full."""
    swappable = hasattr(bits, "light")
    if swappable:
        bits.light = True
    try:
        yield
    finally:
        if swappable:
            bits.light = False
