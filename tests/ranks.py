"""Real ranks for tests: processes that talk over gloo.

`run_ranks` sends a function to a pool of four processes that live as long as the test session;
they are forked from a server that has imported torch once, so even a new pool costs little.
`spawn_ranks` starts processes of their own, which a test may kill or stop. Functions must be at the
top level of an importable module; they are called as `fn(mesh, *args)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zfunc.comm.compat import Store
from zfunc.comm.start import connect
from zfunc.errors import RankLostError, RemoteRankError
from zfunc.meshes import Mesh

__all__ = [
    "Outcome",
    "Ranks",
    "RanksError",
    "connected",
    "rank_pool",
    "run_ranks",
    "spawn_ranks",
]

POOL_SIZE = 4
_MESH_TIMEOUT_S = 30.0
_GRACE_S = 3.0
_START_S = 60.0
_LOG_TAIL = 4000


class RanksError(RuntimeError):
    """Ranks failed; the text has what each of them said."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of a call on one rank.

    Attributes:
        value: what it returned.
        error: what it raised, if that could be sent.
        text: its traceback, or how it ended; empty when it returned.
        seconds: how long it took, as the rank measured it.
    """

    value: Any = None
    error: BaseException | None = None
    text: str = ""
    seconds: float = 0.0


class Ranks:
    """A few processes that wait for calls."""

    def __init__(self, size: int, *, mesh_timeout_s: float = _MESH_TIMEOUT_S):
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "zfunc.comm", "tests.warm"])
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, self._folder.name, theirs, mesh_timeout_s),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    @property
    def usable(self) -> bool:
        """Whether every process is alive."""
        return all(process.is_alive() for process in self.processes)

    def submit(
        self, world: int, fn: Callable[..., Any], *args: Any, axes: Mapping[str, int] | None = None
    ) -> None:
        """Sends a call to the first `world` ranks, on a mesh of `axes` (one axis if None)."""
        sizes = dict(axes) if axes else {"shard": world}
        call = pickle.dumps((sizes, world, fn, args))
        for pipe in self._pipes[:world]:
            pipe.send_bytes(call)

    def outcomes(
        self, world: int, *, timeout_s: float, all_s: float | None = None
    ) -> list[Outcome]:
        """Collects what became of a call; a rank that does not answer in time has only a text.

        Args:
            world: how many ranks were called.
            timeout_s: how long to wait in all.
            all_s: how long to wait for the others once one has failed; None for `timeout_s`.

        Returns:
            One outcome per rank.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, Outcome] = {}
        while len(found) < world and time.monotonic() < deadline:
            for rank in self._ready(world, found, deadline):
                found[rank] = self._receive(rank)
                if found[rank].text and all_s is not None:
                    deadline = min(deadline, time.monotonic() + all_s)
        silent = Outcome(text=f"no answer within {timeout_s:g} s")
        return [found.get(rank, silent) for rank in range(world)]

    def kill(self, rank: int) -> None:
        """Kills one rank at once."""
        self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """Freezes one rank."""
        self._signal(rank, signal.SIGSTOP)

    def log(self, rank: int) -> str:
        """What a rank has printed."""
        path = Path(self._folder.name, f"{rank}.log")
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Ends every process."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
            process.join()
        self._folder.cleanup()

    def _ready(self, world: int, found: Mapping[int, Outcome], deadline: float) -> list[int]:
        """The ranks that have answered or died since."""
        pending = [rank for rank in range(world) if rank not in found]
        sources: dict[Any, int] = {self._pipes[rank]: rank for rank in pending}
        sources |= {self.processes[rank].sentinel: rank for rank in pending}
        ready = wait(list(sources), max(0.0, deadline - time.monotonic()))
        return sorted({sources[source] for source in ready})

    def _receive(self, rank: int) -> Outcome:
        try:
            if self._pipes[rank].poll():
                return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            pass
        self.processes[rank].join(1.0)
        return Outcome(text=f"died with exit code {self.processes[rank].exitcode}")

    def _signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)


class _Pool:
    """The living pool, made when first needed and again after a failure."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None

    def get(self) -> Ranks:
        if self.ranks is not None and not self.ranks.usable:
            self.close()
        if self.ranks is None:
            self.ranks = Ranks(POOL_SIZE)
        return self.ranks

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None


_POOL = _Pool()


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    axes: Mapping[str, int] | None = None,
) -> list[Any]:
    """Calls `fn(mesh, *args)` on `world` ranks of the pool.

    Args:
        world: the number of ranks, at most 4.
        fn: a function at the top level of an importable module.
        args: what to pass; pickled.
        timeout_s: how long the call may take.
        axes: the axes of the mesh; None for `{"shard": world}`.

    Returns:
        The results, in rank order.

    Raises:
        Exception: the lowest rank's own exception, from a `RanksError` with every rank's text.
        RanksError: ranks died or did not answer.
    """
    ranks = _POOL.get()
    ranks.submit(world, fn, *args, axes=axes)
    outcomes = ranks.outcomes(world, timeout_s=timeout_s, all_s=_GRACE_S)
    if any(outcome.text for outcome in outcomes):
        report = _report(ranks, outcomes)
        _POOL.close()
        _raise(outcomes, report)
    return [outcome.value for outcome in outcomes]


@contextlib.contextmanager
def spawn_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    axes: Mapping[str, int] | None = None,
    mesh_timeout_s: float = 5.0,
) -> Iterator[Ranks]:
    """Starts processes of their own for one call, to be killed or stopped by the test.

    Example:
        with spawn_ranks(2, wait_for_peer) as ranks:
            ranks.kill(1)
            survivor = ranks.outcomes(2, timeout_s=10)[0]
    """
    ranks = Ranks(world, mesh_timeout_s=mesh_timeout_s)
    try:
        ranks.submit(world, fn, *args, axes=axes)
        yield ranks
    finally:
        ranks.close()


@pytest.fixture(scope="session", autouse=True)
def rank_pool() -> Iterator[None]:
    """Ends the pool with the session."""
    yield
    _POOL.close()


def _serve(rank: int, size: int, folder: str, pipe: Connection, mesh_timeout_s: float) -> None:
    """The life of one process: calls come in, outcomes go out."""
    log = os.open(os.path.join(folder, f"{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.FileStore(os.path.join(folder, "store"), size)  # pyright: ignore
    meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}
    with contextlib.suppress(EOFError):
        while True:
            axes, world, fn, args = pickle.loads(pipe.recv_bytes())
            key = tuple(axes.items())
            started = time.perf_counter()
            try:
                if key not in meshes:
                    meshes[key] = connected(store, axes, world, rank, mesh_timeout_s)
                outcome = Outcome(fn(meshes[key], *args))
            except BaseException as error:
                outcome = Outcome(error=_sendable(error), text=traceback.format_exc())
            outcome.seconds = time.perf_counter() - started
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(_packed(outcome))


def connected(
    store: Store, axes: Mapping[str, int], world: int, rank: int, timeout_s: float
) -> Mesh:
    """Makes a mesh once all its processes are there: its own bound may be short."""
    name = f"up/{sorted(axes.items())}/"
    store.set(f"{name}{rank}", "")
    store.wait([f"{name}{other}" for other in range(world)], timedelta(seconds=_START_S))
    processes = tuple(range(world))
    device = torch.device("cpu")
    return connect(axes, processes, rank, device=device, timeout_s=timeout_s, store=store)


def _packed(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception:
        return pickle.dumps(Outcome(text=traceback.format_exc()))


def _sendable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _report(ranks: Ranks, outcomes: list[Outcome]) -> str:
    parts = []
    for rank, outcome in enumerate(outcomes):
        parts.append(f"--- rank {rank}: {outcome.text or 'returned'}")
        if log := ranks.log(rank).strip():
            parts.append(f"    printed: {log[-_LOG_TAIL:]}")
    return "\n".join(parts)


def _raise(outcomes: list[Outcome], report: str) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    silent = any(outcome.text and outcome.error is None for outcome in outcomes)
    own = [error for error in errors if not isinstance(error, (RankLostError, RemoteRankError))]
    if own or (errors and not silent):
        raise (own or errors)[0] from RanksError(report)
    raise RanksError(report)
