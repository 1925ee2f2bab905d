"""Ctrl-C in a step: heard before the commit point, else after the step has returned.

An interrupt in the middle of an update would leave half a state, and one on a single rank would
leave the others waiting. So a step takes SIGINT over: before the commit point it counts as this
rank's failure, which every rank learns of in the agreement or in the status op; later it is sent
again when the new state has been handed to the caller.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Interrupts", "deferred_interrupts"]

_RETURNED_S = 0.05


class Interrupts:
    """Holds SIGINT back, but for the stretches that say they can bear it."""

    def __init__(self) -> None:
        self._arrived = False
        self._bearable = False

    def __call__(self, number: int, frame: Any) -> None:
        """Handles the signal."""
        self._arrived = True
        if self._bearable:
            self.raise_arrived()

    @property
    def pending(self) -> bool:
        """Whether one has arrived that nobody has heard of."""
        return self._arrived

    def raise_arrived(self) -> None:
        """Raises `KeyboardInterrupt` if one has arrived; it is then not sent again."""
        if self._arrived:
            self._arrived = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Raises at once inside, wherever Python is."""
        self._bearable = True
        try:
            self.raise_arrived()
            yield
        finally:
            self._bearable = False


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """Takes SIGINT over inside; within another such stretch, that one's.

    Does nothing outside of the main thread, or where the program has a handler of its own.

    Yields:
        What has arrived.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Interrupts()
        return
    before = signal.getsignal(signal.SIGINT)
    if isinstance(before, Interrupts):
        yield before
        return
    interrupts = Interrupts()
    if before is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts.pending:
            _send_again()


def _send_again() -> None:
    """Interrupts the main thread a moment later, when the step has returned to its caller."""
    main = threading.main_thread().ident
    assert main is not None
    again = threading.Timer(_RETURNED_S, signal.pthread_kill, [main, signal.SIGINT])
    again.daemon = True
    again.start()
