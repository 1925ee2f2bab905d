"""A rank that is killed or stopped at any op of a step: named, with the step, on all others.

Every item of every case's schedule, before and after the commit point, and every exchange of the
whole mesh (agreement before the step, the negotiation of a union, the status op) has its turn, with
SIGKILL and with SIGSTOP; the rank that is lost changes with the place. The ranks are forked from a
process that has made the first step on virtual ranks, see `tests.faults.forked`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

import zfunc
from tests.faults.case import CASES, RATE, Case, Training, act_at, params, report
from tests.faults.forked import Ending, Setting, run_forked
from tests.harness import assert_equal, bits, ranks
from zfunc import optim
from zfunc.meshes import Comm
from zfunc.programs import Bounded

TIMEOUT_S = 2.0
HOSTED_TIMEOUT_S = 6.0  # a TCP store looks up names, which may take 5 s
GRACE_S = 1.5  # following the chain of blame
SLACK_S = 8.0  # the same, at the worst moment of a machine that is busy with others
SOON_S = 2.0
LIFE_S = 40.0
ALL_S = 240.0
HOWS = (signal.SIGKILL, signal.SIGSTOP)


class Relay:
    """Hands every call on to a communicator that can be changed, and acts before an exchange."""

    def __init__(self, comm: Comm):
        self.comm = comm
        self.exchanges = 0
        self.act: Callable[[int], object] = _nothing

    def exchange(self, payload: bytes) -> list[bytes]:
        self.act(self.exchanges)
        self.exchanges += 1
        return self.comm.exchange(payload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A way to lose a rank.

    Attributes:
        how: the signal.
        rank: who is lost.
        step: in which step.
        kind: just before an "op" of the schedule, or an "exchange" of the whole mesh.
        at: which of them.
        early: whether this is before the commit point.
    """

    how: signal.Signals
    rank: int
    step: int
    kind: str
    at: int
    early: bool

    def __str__(self) -> str:
        return f"{self.how.name} on rank {self.rank} before {self.kind} {self.at} in {self.step}"


def begin(mesh: zfunc.Mesh, case: Case, steps: int) -> tuple[Training, list[int], list[Any]]:
    """Some steps on a mesh whose communicator can be changed; exchanges and pieces after each."""
    assert mesh.comm is not None
    relay: Any = Relay(mesh.comm)
    training = Training(dataclasses.replace(mesh, comm=relay), case, checked=False)
    counts, pieces = [], []
    for _ in range(steps):
        relay.exchanges = 0
        training.step()
        counts.append(relay.exchanges)
        pieces.append(bits(training.state.params))
    return training, counts, pieces


def traced(mesh: zfunc.Mesh, case: Case) -> Training:
    """No step, but all is traced: ranks have yet to agree only."""
    training, *_ = begin(mesh, case, 1)
    training.state = training.run.init(params(), optim.sgd(RATE))
    programs = training.run._training.programs
    programs.agreed, programs.resolved = Bounded(8), Bounded(8)
    return training


def prepare(case: Case) -> tuple[list[Job], Any]:
    """All ways to lose a rank; per step the trainings that are about to make it, what it gives."""
    seen = ranks(case.axes, begin, case, 2)
    training, counts, _ = seen[0]
    num_ops, commit_at = len(training.executor.schedule), training.commit_at
    assert num_ops > commit_at > 2
    places = [(1, "op", at, at <= commit_at) for at in range(num_ops)]
    places += [
        (step, "exchange", at, True) for step, count in enumerate(counts) for at in range(count)
    ]
    jobs = [
        Job(how, (number + turn) % case.world, *place)
        for turn, how in enumerate(HOWS)
        for number, place in enumerate(places)
    ]
    started = [training for training, *_ in ranks(case.axes, begin, case, 1)]
    trainings = {0: ranks(case.axes, traced, case), 1: started}
    return jobs, (trainings, [pieces for *_, pieces in seen])


def lose(mesh: zfunc.Mesh, shared: Any, job: Job) -> Any:
    """Loses a rank; a survivor says what it saw of two calls."""
    trainings, pieces = shared
    training = trainings[job.step][mesh.rank]
    relay = training.mesh.comm
    relay.comm, relay.exchanges = mesh.comm, 0

    def vanish() -> NoReturn:
        os.kill(os.getpid(), job.how)
        while True:  # the signal may go to another thread, and take a moment
            signal.pause()

    if mesh.rank == job.rank:
        if job.kind == "op":
            act_at(training.executor, job.at, vanish)
        else:
            relay.act = lambda number: vanish() if number == job.at else None
    before = bits(training.state.params)
    seen = []
    for _ in range(2):
        number, started = int(training.state.step), time.perf_counter()
        name, text = report(training.step)
        seen.append((number, name, text, time.perf_counter() - started))
        if job.early:
            assert_equal(bits(training.state.params), before)
        elif not name:
            assert_equal(bits(training.state.params), pieces[mesh.rank][number])
    return seen


def check(job: Job, endings: list[Ending], timeout_s: float = TIMEOUT_S) -> list[float]:
    """Compares what the survivors saw with what they should have seen; how long they waited."""
    assert endings[job.rank].signal == job.how, f"{job}: {endings[job.rank]}"
    waited = []
    for rank, ending in enumerate(endings):
        if rank == job.rank:
            continue
        where = f"{job}, on rank {rank}"
        assert not ending.text, f"{where}: {ending.text}"
        (number, name, text, seconds), last = ending.value
        if not job.early and not name:  # it had sent all that this step needs
            number, name, text, seconds = last
            assert number == job.step + 1, where
        else:
            assert last[:3] == (number, name, text), f"{where}: {last}"
            assert last[3] < SOON_S, where  # no second wait
        assert name == "RankLostError", f"{where}: {name} {text}"
        assert text.startswith(f"step {number}: rank {job.rank} was lost"), f"{where}: {text}"
        assert seconds < timeout_s + SLACK_S, f"{where}: {seconds}"
        waited.append(seconds)
    return waited


@pytest.mark.parametrize("name", CASES)
def test_at_every_op(name: str) -> None:
    case = CASES[name]
    setting = Setting(case.axes, TIMEOUT_S, LIFE_S)
    results = run_forked(setting, prepare, lose, case, timeout_s=ALL_S)
    for how in HOWS:
        waited = [check(job, endings) for job, endings in results if job.how is how]
        assert len(waited) > 5
        bound_s = GRACE_S + (TIMEOUT_S if how is signal.SIGSTOP else 0.0)
        assert statistics.median(min(seconds) for seconds in waited) < bound_s


def for_rank_0(case: Case) -> tuple[list[Job], Any]:
    jobs, shared = prepare(case)
    return [dataclasses.replace(job, rank=0) for job in jobs[::2]], shared


def test_the_rank_that_holds_the_store() -> None:
    """Nobody can read whom others gave up on; ranks that waited for a survivor do not name it."""
    case = CASES["hybrid"]
    setting = Setting(case.axes, HOSTED_TIMEOUT_S, LIFE_S, hosted=True)
    results = run_forked(setting, for_rank_0, lose, case, timeout_s=ALL_S)
    assert len({job.how for job, _ in results}) == len(HOWS) and len(results) > 10
    for job, endings in results:
        check(job, endings, HOSTED_TIMEOUT_S)


def large_messages(case: Case) -> tuple[list[Job], Any]:
    jobs = [Job(how, rank, 0, "end", 0, True) for how in HOWS for rank in range(case.world)]
    return jobs, None


def lose_amid(mesh: zfunc.Mesh, shared: None, job: Job) -> str:
    """Loses a rank that has begun to send what takes many packets."""
    numel, comm = 1 << 23, mesh.comm
    assert comm is not None
    full = torch.zeros(numel)
    start, stop = zfunc.meshes.shard_range(numel, mesh.axis_size("shard"), mesh.index("shard"))
    comm.exchange(b"")
    with pytest.raises(zfunc.RankLostError) as lost:
        handle = comm.gather("shard", [torch.ones(stop - start)], [full])
        if mesh.rank == job.rank:
            os.kill(os.getpid(), job.how)
        handle.wait()
        assert bool((full == 1).all()), "whoever returns has all of it"
        comm.exchange(b"")
    return str(lost.value)


def test_in_the_middle_of_a_message() -> None:
    case = Case(axes={"shard": 3})
    results = run_forked(
        Setting(case.axes, TIMEOUT_S, LIFE_S), large_messages, lose_amid, case, timeout_s=ALL_S
    )
    for job, endings in results:
        assert endings[job.rank].signal == job.how
        for ending in (ending for rank, ending in enumerate(endings) if rank != job.rank):
            assert not ending.text, ending.text
            assert f"rank {job.rank} was lost" in ending.value


def _nothing(_: int) -> None:
    pass
