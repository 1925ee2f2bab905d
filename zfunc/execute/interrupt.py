"""Ctrl-C in a step: heard between ops before the commit point, else after the step has returned.
returned.

An interrupt in the middle of an update would leave half a state, and one on a single rank would
leave the others waiting. So a step takes SIGINT over: before the commit point it counts as this
rank's failure, which every rank learns of in the status op; later it is sent again when the new
state has been handed to the caller.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

__all__ = ["deferred_interrupts"]

_RETURNED_S = 0.05


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Holds SIGINT back inside.

    Does nothing outside of the main thread, or where the program has a handler of its own.

    Yields:
        A function that says whether SIGINT has arrived, and takes it: it is not sent again.
    """
    default = signal.default_int_handler
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not default:
        yield lambda: False
        return
    arrived: list[int] = []

    def take() -> bool:
        if not arrived:
            return False
        arrived.clear()
        return True

    signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield take
    finally:
        signal.signal(signal.SIGINT, default)
        if arrived:
            again = threading.Timer(_RETURNED_S, signal.raise_signal, [signal.SIGINT])
            again.daemon = True
            again.start()
