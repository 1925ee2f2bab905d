"""Many short lives of a few ranks: a process that has prepared everything forks them, by groups.

A fresh process takes seconds until it has imported and traced. So one process prepares (on virtual
ranks, say), and then forks the ranks of each job from what it has; they connect over gloo and go
on. Ranks mostly wait for one another, so several groups live at a time. A rank may be killed or
stopped; whatever is left of a group is killed when all its ranks have answered, stopped or died.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from tests.ranks import RanksError, connected

__all__ = ["Ending", "run_forked"]

AT_ONCE = 20
POLL_S = 0.02
START_S = 5.0
LOG_TAIL = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How the life of one rank ended.

    Attributes:
        value: what it returned.
        text: its traceback, or what it printed if it gave no answer.
        signal: what killed or stopped it, 0 if nothing did.
    """

    value: Any = None
    text: str = ""
    signal: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What all groups have in common.

    Attributes:
        axes: the axes of each group's mesh.
        mesh_timeout_s: the bound of every wait of a mesh.
        life_s: the bound of a group's life; ranks that have not ended by then are killed.
        hosted: whether ranks meet in a store that rank 0 holds, rather than in a file.
    """

    axes: Mapping[str, int]
    mesh_timeout_s: float
    life_s: float
    hosted: bool = False

    @property
    def world(self) -> int:
        """The number of ranks of a group."""
        return math.prod(self.axes.values())


def run_forked(
    setting: Setting,
    prepare: Callable[..., tuple[Sequence[Any], Any]],
    live: Callable[..., Any],
    *args: Any,
    timeout_s: float,
) -> list[tuple[Any, list[Ending]]]:
    """Lives through jobs, each on a group of ranks of its own.

    Args:
        setting: what the groups have in common.
        prepare: `prepare(*args)` gives the jobs, and what ranks share; called once, in a process
            that must have a single thread when it returns.
        live: `live(mesh, shared, job)`, called on every rank of every job.
        args: what `prepare` gets.
        timeout_s: the bound of it all.

    Returns:
        Each job, and how each of its ranks ended.

    Raises:
        RanksError: `prepare` failed, or all took too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "zfunc.comm", "tests.warm"])
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(theirs, setting, prepare, live, args), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise RanksError(f"the groups of ranks did not end within {timeout_s:g} s")
        text, results = pickle.loads(ours.recv_bytes())
    finally:
        with contextlib.suppress(ProcessLookupError):
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has forked
        process.join()
        ours.close()
    if text:
        raise RanksError(text)
    return results


def _serve(pipe: Connection, setting: Setting, prepare: Any, live: Any, args: Any) -> None:
    """The life of the process that forks."""
    os.setpgrp()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        jobs, shared = prepare(*args)
        answer = "", live_all(setting, jobs, lambda mesh, job: live(mesh, shared, job))
    except BaseException:
        answer = traceback.format_exc(), []
    pipe.send_bytes(pickle.dumps(answer))


def live_all(
    setting: Setting, jobs: Sequence[Any], live: Callable[[Any, Any], Any]
) -> list[tuple[Any, list[Ending]]]:
    """Forks a group for each job, some at a time."""
    _await_threads()
    gc.collect()
    gc.freeze()
    waiting = collections.deque(enumerate(jobs))
    groups: dict[int, _Group] = {}
    done: dict[int, list[Ending]] = {}
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        while waiting or groups:
            while waiting and len(groups) < AT_ONCE:
                number, job = waiting.popleft()
                base = Path(folder, str(number))
                base.mkdir()
                groups[number] = _Group(base, setting, lambda mesh, job=job: live(mesh, job))
            wait([pipe for group in groups.values() for pipe in group.open_pipes()], POLL_S)
            for number in [number for number, group in groups.items() if group.ended()]:
                done[number] = groups.pop(number).close()
    return [(job, done[number]) for number, job in enumerate(jobs)]


def _await_threads() -> None:
    """A thread that Python has joined may take a moment to end; a fork would lose any other."""
    deadline = time.monotonic() + START_S
    while (count := len(os.listdir("/proc/self/task"))) > 1:
        if time.monotonic() > deadline:
            raise RanksError(f"a process of {count} threads cannot fork")
        time.sleep(POLL_S)


class _Group:
    """The processes of one job."""

    def __init__(self, folder: Path, setting: Setting, live: Callable[[Any], Any]):
        self._folder = folder
        self._deadline = time.monotonic() + setting.life_s
        self._pids: list[int] = []
        self._pipes: list[Connection] = []
        self._endings: dict[int, Ending] = {}
        for rank in range(setting.world):
            ours, theirs = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                with contextlib.ExitStack() as last:
                    last.callback(os._exit, 1)
                    _live(rank, folder, setting, live, theirs)
                    os._exit(0)
            theirs.close()
            self._pids.append(pid)
            self._pipes.append(ours)

    def open_pipes(self) -> list[Connection]:
        """The pipes of ranks that have not ended."""
        return [pipe for rank, pipe in enumerate(self._pipes) if rank not in self._endings]

    def ended(self) -> bool:
        """Looks for ranks that have answered, stopped or died; whether all have."""
        late = time.monotonic() > self._deadline
        for rank, pipe in enumerate(self._pipes):
            if rank in self._endings:
                continue
            if pipe.poll():
                self._endings[rank] = self._received(rank)
                continue
            pid, status = os.waitpid(self._pids[rank], os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                self._endings[rank] = Ending(signal=os.WSTOPSIG(status))
            elif pid:
                self._endings[rank] = self._died(rank, status)
            elif late:
                self._endings[rank] = Ending(text=f"did not end in time\n{self._log(rank)}")
        return len(self._endings) == len(self._pids)

    def close(self) -> list[Ending]:
        """Ends what is left; how each rank ended."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for pipe in self._pipes:
            pipe.close()
        return [self._endings[rank] for rank in range(len(self._pids))]

    def _received(self, rank: int) -> Ending:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            return self._died(rank, os.waitpid(self._pids[rank], 0)[1])

    def _died(self, rank: int, status: int) -> Ending:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return Ending(text=f"ended without an answer\n{self._log(rank)}", signal=number)

    def _log(self, rank: int) -> str:
        return Path(self._folder, f"{rank}.log").read_text(errors="replace")[-LOG_TAIL:]


def _live(
    rank: int,
    folder: Path,
    setting: Setting,
    live: Callable[[Any], Any],
    pipe: Connection,
) -> None:
    """The life of one rank."""
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        store = _hosted(folder, rank) if setting.hosted else _filed(folder, setting.world)
        mesh = connected(store, setting.axes, setting.world, rank, setting.mesh_timeout_s)
        ending = Ending(live(mesh))
    except BaseException:
        ending = Ending(text=traceback.format_exc())
    pipe.send_bytes(pickle.dumps(ending))


def _filed(folder: Path, world: int) -> Store:
    return dist.FileStore(str(folder / "store"), world)  # pyright: ignore


def _hosted(folder: Path, rank: int) -> Store:
    """A store that lives in the process of rank 0; its port is told in a file."""
    told = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(told)
        return store
    while not told.exists():
        time.sleep(POLL_S)
    return dist.TCPStore("127.0.0.1", int(told.read_text()), wait_for_workers=False)
