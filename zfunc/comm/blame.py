"""Which rank was lost: each survivor says whom it waited for, and the chain is followed to its end.

A rank that waits for another that itself waits for a dead one would name the wrong rank. So a
survivor posts whom it gave up on, and looks whether that rank has posted too: then it was alive,
and the blame passes on. A rank may hold the store itself: if it no longer answers, that rank is
lost. Every look is bounded.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from zfunc.comm.compat import Store
from zfunc.errors import RankLostError, explain

__all__ = ["Watch", "as_lost"]

# How long after this rank another may give up: a share of the bound of a wait, within limits.
_GRACE = 0.1
_GRACE_S = (1.0, 10.0)
_ANSWER_S = 2.0
_ASK_S = 0.02


class Watch:
    """Turns the first failed wait of a rank into the error that it raises from then on."""

    def __init__(self, store: Store, rank: int, timeout_s: float, holder: int | None = None):
        """Starts with no failure.

        Args:
            store: shared by the ranks of one mesh.
            rank: this rank.
            timeout_s: the bound of a wait.
            holder: the rank whose process holds the store; None if it is a process of its own.
        """
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._holder = holder
        self._grace_s = min(max(_GRACE_S[0], _GRACE * timeout_s), _GRACE_S[1])
        self._failure = ""

    def check(self) -> None:
        """Raises `RankLostError` again if a rank has been lost."""
        if self._failure:
            raise RankLostError(self._failure)

    def lost(self, suspect: int, doing: str, error: Exception) -> RankLostError:
        """Finds out which rank was lost.

        Args:
            suspect: the rank that this one waited for.
            doing: what this rank was doing.
            error: what the transport raised.

        Returns:
            The error to raise: the first one, if this is not the first.
        """
        if not self._failure:
            self._failure = self._explain(self._follow(suspect), suspect, doing, str(error))
            if self._holder == self._rank:
                time.sleep(self._grace_s)  # others read the store of this process until it ends
        return RankLostError(self._failure)

    def _follow(self, suspect: int) -> int:
        """The end of the chain of ranks that gave up on one another, as far as it can be read."""
        found, ended = [suspect], threading.Event()

        def follow() -> None:
            seen = {self._rank}
            with contextlib.suppress(RuntimeError, ValueError):  # of a store that is gone
                self._store.set(_key(self._rank), str(suspect))
                while found[-1] not in seen:
                    seen.add(found[-1])
                    if not self._posted(found[-1]):
                        break
                    found.append(int(self._store.get(_key(found[-1]))))
                ended.set()

        # A store whose holder is frozen never answers: the asking is left behind in its own thread.
        asking = threading.Thread(target=follow, daemon=True)
        asking.start()
        asking.join(_ANSWER_S + self._grace_s)
        if self._holder is None or ended.is_set():
            return found[-1]
        return self._holder

    def _posted(self, rank: int) -> bool:
        """Whether a rank gives up on another within the grace time.

        Asks again and again: a store's own wait may round its bound up by a second.
        """
        deadline = time.monotonic() + self._grace_s
        while not self._store.check([_key(rank)]):
            if time.monotonic() > deadline:
                return False
            time.sleep(_ASK_S)
        return True

    def _explain(self, lost: int, suspect: int, doing: str, reason: str) -> str:
        if lost == self._rank:
            problem = f"rank {suspect} gave up on this rank ({lost}) before {doing}"
        elif lost in (suspect, self._holder):
            problem = f"rank {lost} was lost during {doing}"
        else:
            problem = f"rank {lost} was lost: rank {suspect} waited for it, this one in {doing}"
        return explain(
            problem,
            expected=f"the same call on every rank within {self._timeout_s:g} s",
            got=_cause(reason),
            do="start again from the last checkpoint; raise `timeout_s` if the rank was only slow",
        )


@contextlib.contextmanager
def as_lost(doing: str, timeout_s: float | None = None) -> Iterator[None]:
    """Turns a transport's error into `RankLostError` where it cannot be known which rank it was."""
    try:
        yield
    except RankLostError:
        raise
    except RuntimeError as error:
        raise RankLostError(
            explain(
                f"a rank was lost during {doing}",
                expected=None if timeout_s is None else f"every rank within {timeout_s:g} s",
                got=_cause(str(error)),
                do="see why it ended or never came, and start again from the last checkpoint",
            )
        ) from error


def _key(rank: int) -> str:
    return f"lost/{rank}"


def _cause(reason: str) -> str:
    """Keeps the one fact of a transport's message."""
    text = reason.splitlines()[0] if reason else "an error without a text"
    if any(sign in text for sign in ("closed by peer", "reset by peer", "Broken pipe")):
        return "its connection closed"
    if "imed out" in text or "imeout" in text:
        return "no answer"
    return text
