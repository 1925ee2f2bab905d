"""Several functions that take turns in one process: each has a thread, and one baton goes round.

Only the thread that holds the baton runs. It hands over when it must wait for another or has ended,
to the next one in rank order that can go on; so the interleaving depends on the functions alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zfunc.comm.generators import Generators, generators_kept

__all__ = ["Baton", "Outcome"]

_LOOK_S = 0.2


@dataclasses.dataclass(slots=True)
class Outcome:
    """What one function gave.

    Attributes:
        value: what it returned.
        error: what it raised instead.
    """

    value: Any = None
    error: BaseException | None = None


class Baton:
    """Runs functions by turns.

    Attributes:
        ended: the ranks that have returned or raised.
    """

    def __init__(self, size: int, on_stuck: Callable[[], None]):
        """Makes a baton.

        Args:
            size: the number of functions.
            on_stuck: called when all that have not ended wait; must let at least one go on.
        """
        self.ended: set[int] = set()
        self._size = size
        self._on_stuck = on_stuck
        self._turns = [_taken_lock() for _ in range(size)]
        self._over = _taken_lock()
        self._waits: dict[int, Callable[[], bool]] = {}
        self._generators: list[Generators] = []

    def run(self, functions: Sequence[Callable[[], Any]], *, on_interrupt: Callable[[], None]):
        """Runs one function per rank, each under a copy of the caller's generators and modes.

        Args:
            functions: one per rank.
            on_interrupt: called when the caller is interrupted; must let every wait end.

        Returns:
            The outcome of every rank.
        """
        outcomes = [Outcome() for _ in functions]
        modes = _Modes()
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._live, rank, function, outcomes[rank], modes),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank, function in enumerate(functions)
        ]
        with generators_kept():
            self._generators = [Generators() for _ in functions]
            for thread in threads:
                thread.start()
            self._turns[0].release()
            try:
                # A signal that comes just before the lock blocks is seen when it returns.
                while not self._over.acquire(timeout=_LOOK_S):
                    pass
            except BaseException:
                on_interrupt()
                raise
            finally:
                for thread in threads:
                    thread.join()
        return outcomes

    def wait_until(self, rank: int, may_go: Callable[[], bool]) -> None:
        """Hands over until `may_go()`; returns at once if it already holds."""
        if may_go():
            return
        self._waits[rank] = may_go
        self._generators[rank].leave()
        following = self._next(rank)
        if following != rank:
            self._turns[following].release()
            self._turns[rank].acquire()
        self._generators[rank].enter()
        del self._waits[rank]

    def _live(
        self, rank: int, function: Callable[[], Any], outcome: Outcome, modes: _Modes
    ) -> None:
        self._turns[rank].acquire()
        self._generators[rank].enter()
        try:
            with modes.entered():
                outcome.value = function()
        except BaseException as error:
            outcome.error = error
        self.ended.add(rank)
        if len(self.ended) == self._size:
            self._over.release()
        else:
            self._turns[self._next(rank)].release()

    def _next(self, rank: int) -> int:
        order = [(rank + step) % self._size for step in range(1, self._size + 1)]
        alive = [other for other in order if other not in self.ended]
        for _ in range(2):
            for other in alive:
                if other not in self._waits or self._waits[other]():
                    return other
            self._on_stuck()
        raise AssertionError("every rank waits")


@dataclasses.dataclass(frozen=True, slots=True)
class _Modes:
    """The caller's torch modes that belong to a thread."""

    grad: bool = dataclasses.field(default_factory=torch.is_grad_enabled)
    inference: bool = dataclasses.field(default_factory=torch.is_inference_mode_enabled)
    autocast: bool = dataclasses.field(default_factory=lambda: torch.is_autocast_enabled("cpu"))
    autocast_dtype: torch.dtype = dataclasses.field(
        default_factory=lambda: torch.get_autocast_dtype("cpu")
    )
    device: torch.device = dataclasses.field(default_factory=torch.get_default_device)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", self.autocast_dtype))
            if self.device != torch.device("cpu"):
                stack.enter_context(self.device)
            yield


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
