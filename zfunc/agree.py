"""Agreement: before the first collective of a call, every rank learns that all others will follow.

The ranks exchange a small frame on the control group: whether preparing failed, the digest of the
program, a hash of all that must be equal, and the count of steps. A rank that failed makes every
rank raise; nothing was communicated yet, and the state from before stays valid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from zfunc.errors import (
    CaptureError,
    LayoutError,
    ProgramMismatchError,
    RankLostError,
    RemoteRankError,
    explain,
)
from zfunc.meshes import Mesh
from zfunc.scope import scope

__all__ = [
    "Agreement",
    "Proposal",
    "agree",
    "check_real",
    "exchange_facts",
    "exchange_failures",
    "hash_of",
    "naming",
    "raise_failures",
    "spelled",
    "telling_others",
]

_OK, _FAILED = b"\x00", b"\x01"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST_MESSAGE = 20_000


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """What a rank is about to do.

    Attributes:
        digest: 16 bytes, of the sequence of collectives.
        context: 16 bytes, of everything else that must be equal.
        about: gives what the context is made of, one fact a line, for the message if contexts
            differ.
        pattern: 16 bytes, of all that decides what it does if ranks must be united.
    """

    digest: bytes
    context: bytes
    about: Callable[[], str]
    pattern: bytes = bytes(16)


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks are about to do, known to each; hashable.

    Attributes:
        digests: of every rank's sequence of collectives.
        patterns: of every rank, see `Proposal`.
    """

    digests: tuple[bytes, ...]
    patterns: tuple[bytes, ...]

    @property
    def alike(self) -> bool:
        """Whether all ranks communicate alike, so that each may run its own program."""
        return len(set(self.digests)) == 1


def hash_of(*parts: object) -> bytes:
    """16 bytes that are equal on every rank for equal parts."""
    return hashlib.blake2b(_encoded(spelled(parts)), digest_size=16).digest()


def spelled(part: object) -> str:
    """The repr of a value without addresses, which differ between processes."""
    return _ADDRESS.sub("", repr(part))


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Says in the error about a lost rank in which call it was lost."""
    try:
        yield
    except RankLostError as error:
        raise RankLostError(f"{what}: {error}") from error


def check_real(mesh: Mesh) -> None:
    """Raises `LayoutError` for a mesh of names and sizes only: nothing runs on it."""
    if mesh.is_abstract:
        raise LayoutError(
            explain(
                f"{mesh} is abstract: nothing runs on it",
                expected="a mesh made by zfunc.mesh or zfunc.local_mesh",
                do="look at programs with lower(), or make a real mesh",
            )
        )


@contextlib.contextmanager
def telling_others(mesh: Mesh, what: str) -> Iterator[None]:
    """Turns a failure before agreement into an error on every rank.

    Args:
        mesh: the mesh.
        what: the call, such as "step 3", for the message elsewhere.

    Raises:
        CaptureError: it is a call inside of a function that is being captured or called by another.
    """
    if scope() is not None:
        raise CaptureError(
            explain(
                f"{what} inside of a function that zfunc runs",
                expected="gather and scatter as the only calls that communicate in there",
                do="call it outside, and pass the result in the batch",
            )
        )
    try:
        yield
    except RankLostError:
        raise
    except BaseException as error:
        if mesh.comm is not None:
            mesh.comm.exchange(_FAILED)
            _exchange_messages(mesh, error, what)
        raise


def agree(mesh: Mesh, own: Proposal, what: str) -> Agreement:
    """Exchanges proposals.

    Args:
        mesh: the mesh; every rank calls this, or fails inside `telling_others`.
        own: what this rank is about to do.
        what: the call, for messages.

    Returns:
        What every rank proposed; ranks may run only when it is alike.

    Raises:
        RemoteRankError: another rank failed.
        ProgramMismatchError: the contexts differ; names the first difference.
        RankLostError: a rank did not answer in time.
    """
    if mesh.comm is None:
        return Agreement((own.digest,), (own.pattern,))
    frames = mesh.comm.exchange(_OK + own.digest + own.context + own.pattern)
    failed = [rank for rank, frame in enumerate(frames) if frame[:1] == _FAILED]
    if failed:
        messages = _exchange_messages(mesh, None, what)
        raise_failures(failed, messages, what)
    if any(frame[17:33] != own.context for frame in frames):
        _raise_difference(mesh, own.about(), f"{what}: ranks were called with different settings")
    return Agreement(tuple(frame[1:17] for frame in frames), tuple(frame[33:] for frame in frames))


def raise_failures(failed: list[int], messages: list[str], what: str) -> NoReturn:
    """Raises `RemoteRankError` with the message of the lowest rank that failed."""
    rank = failed[0]
    others = f" (and on ranks {failed[1:]})" if failed[1:] else ""
    raise RemoteRankError(
        explain(
            f"{what} failed on rank {rank}{others}: {messages[rank]}",
            do="the state from before the call is valid on every rank",
        ),
        rank=rank,
    )


def exchange_facts(mesh: Mesh, facts: Any, what: str) -> list[Any]:
    """Gives every rank the facts of all; a rank that could not state its own gives the exception.

    Raises:
        RemoteRankError: another rank gave an exception (this rank raises its own).
    """
    failed = isinstance(facts, Exception)
    assert mesh.comm is not None
    payload = (_FAILED if failed else _OK) + pickle.dumps(_named(facts) if failed else facts)
    rows = mesh.comm.exchange(payload)
    bad = [rank for rank, row in enumerate(rows) if row[:1] == _FAILED]
    if failed:
        raise facts
    if bad:
        messages = [pickle.loads(row[1:]) if row[:1] == _FAILED else "" for row in rows]
        raise_failures(bad, messages, what)
    return [pickle.loads(row[1:]) for row in rows]


def exchange_failures(mesh: Mesh, error: BaseException | None, what: str) -> list[str]:
    """Gives every rank the messages of the ranks that failed in mid-step."""
    return _exchange_messages(mesh, error, what)


def _exchange_messages(mesh: Mesh, error: BaseException | None, what: str) -> list[str]:
    text = "" if error is None else _named(error)
    assert mesh.comm is not None
    return [row.decode(errors="replace") for row in mesh.comm.exchange(_encoded(text))]


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_message(error)}"


def _message(error: BaseException) -> str:
    """What an exception says; others wait for it, so it may neither fail nor be endless."""
    try:
        text = str(error)
    except Exception as problem:
        return f"(no message: its __str__ raises {type(problem).__name__})"
    if len(text) > _LONGEST_MESSAGE:
        return f"{text[:_LONGEST_MESSAGE]} ... ({len(text)} characters)"
    return text


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _raise_difference(mesh: Mesh, text: str, problem: str) -> NoReturn:
    """Exchanges texts and names the first line that differs from rank 0's."""
    assert mesh.comm is not None
    rows = [row.decode().splitlines() for row in mesh.comm.exchange(_encoded(text))]
    for rank, row in enumerate(rows):
        if row == rows[0]:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(rows[0], row, strict=False)) if a != b),
            min(len(rows[0]), len(row)),
        )
        first = rows[0][at] if at < len(rows[0]) else "nothing"
        other = row[at] if at < len(row) else "nothing"
        raise ProgramMismatchError(
            explain(
                problem,
                expected=f"rank 0: {first}",
                got=f"rank {rank}: {other}",
                do="call with the same function, options, shapes and step on every rank",
            )
        )
    raise ProgramMismatchError(problem)
