"""SIGINT at any moment of a step: an error everywhere before the commit point, later none."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import zfunc
from tests.faults.case import CASES, Case, Training, act_at, expected, report
from tests.harness import assert_equal, integers
from tests.ranks import run_ranks
from zfunc import optim

NO_ERROR = ("", "")
WAIT_S = 2.0  # an interrupt is sent again after 0.05 s


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_within(seconds: float) -> bool:
    """Whether an interrupt arrives here, and ends a sleep early."""
    began = time.perf_counter()
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return time.perf_counter() - began < seconds
    return False


def at_every_op(mesh: zfunc.Mesh, case: Case) -> Any:
    """Interrupts one rank at each op of a step, ranks in turn."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    training = Training(mesh, case)
    training.step()
    seen = []
    for at in range(len(training.executor.schedule)):
        rank = at % mesh.size
        late = at >= training.commit_at
        if mesh.rank == rank:
            act_at(training.executor, at, interrupt)
        number = int(training.state.step)
        said = report(training.step)
        came = late and mesh.rank == rank and interrupted_within(WAIT_S)
        seen.append((rank, late, number, said, came))
    assert not interrupted_within(0.1)
    training.step()
    return seen, training.leaves()


@pytest.mark.parametrize("name", ["tight", "zero 1", "dynamic"])
def test_at_every_op(name: str) -> None:
    case = CASES[name]
    results = run_ranks(case.world, at_every_op, case)
    done = 2 + sum(late for _, late, *_ in results[0][0])
    assert done >= 4
    for own, (seen, leaves) in enumerate(results):
        for rank, late, number, (error, text), came in seen:
            if late:
                assert (error, came) == ("", own == rank)
            elif own == rank:
                assert error == "KeyboardInterrupt"
            else:
                assert error == "RemoteRankError"
                assert text.startswith(f"step {number} failed on rank {rank}: KeyboardInterrupt")
        assert_equal(leaves, expected(case, done)[-1])


@dataclasses.dataclass
class Interrupting:
    """A communicator that interrupts its own rank around one exchange.

    Attributes:
        inner: does the work.
        before: the number of the exchange, counted from when it is set.
        after: likewise.
    """

    inner: Any
    before: int = 0
    after: int = 0

    def exchange(self, payload: bytes) -> list[bytes]:
        self.before -= 1
        self.after -= 1
        if self.before == 0:
            interrupt()
        rows = self.inner.exchange(payload)
        if self.after == 0:
            interrupt()
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def around_exchanges(mesh: zfunc.Mesh) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = Interrupting(mesh.comm)
    training = Training(dataclasses.replace(mesh, comm=comm), CASES["zero 1"])  # pyright: ignore
    training.step()
    seen = []
    for way, number in (("before", 1), ("after", 1), ("before", 2), ("after", 2)):
        if mesh.rank == 1:
            setattr(comm, way, number)
        said = report(training.step)
        came = mesh.rank == 1 and said == NO_ERROR and interrupted_within(WAIT_S)
        seen.append((said[0], came))
    training.step()
    return seen, training.leaves()


def test_while_ranks_agree_and_while_they_report() -> None:
    (other, leaves), (own, _) = run_ranks(2, around_exchanges)
    assert own == [("KeyboardInterrupt", False)] * 2 + [("", True)] * 2
    assert other == [("RemoteRankError", False)] * 2 + [("", False)] * 2
    assert_equal(leaves, expected(CASES["zero 1"], 4)[-1])


def while_tracing(mesh: zfunc.Mesh) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hits = []

    def loss(params: Any, batch: Any) -> Any:
        if mesh.rank == 0 and not hits:
            hits.append(1)
            interrupt()
        return (params["w"] * batch).sum()

    step = zfunc.shard(loss, mesh)
    state = step.init({"w": torch.ones(3)}, optim.sgd(0.5))
    said = report(lambda: step(state, torch.ones(3)))
    grads = report(lambda: step.value_and_grad(state.params, torch.ones(3)))
    state, _ = step(state, torch.ones(3))
    return said, grads, zfunc.gather(state.params)["w"].tolist()


def test_while_a_loss_is_traced() -> None:
    own, other = run_ranks(2, while_tracing)
    assert own[0] == ("KeyboardInterrupt", "")
    assert other[0][0] == "RemoteRankError"
    assert other[0][1].startswith("step 0 failed on rank 0: KeyboardInterrupt")
    assert own[1:] == other[1:] == (NO_ERROR, [0.5, 0.5, 0.5])


def test_alone() -> None:
    """One process: before the commit point at once, in the update after the step."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        training = Training(zfunc.mesh(), Case(axes={"shard": 1}))
        training.step()
        act_at(training.executor, 0, interrupt)
        assert report(training.step)[0] == "KeyboardInterrupt"
        training.step()
        act_at(training.executor, training.commit_at + 1, interrupt)
        assert report(training.step) == NO_ERROR
        assert interrupted_within(WAIT_S)
        assert_equal(training.leaves(), expected(Case(axes={"shard": 1}), 3)[-1])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_program_is_left_alone() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        training = Training(zfunc.mesh(), Case(axes={"shard": 1}))
        training.step()
        act_at(training.executor, training.commit_at + 1, interrupt)
        training.step()
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_step_in_another_thread_takes_nothing_over() -> None:
    training = Training(zfunc.mesh(), Case(axes={"shard": 1}))
    handlers = []

    def run() -> None:
        training.step()
        act_at(training.executor, 0, lambda: handlers.append(signal.getsignal(signal.SIGINT)))
        training.step()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_an_endless_loss_can_be_interrupted() -> None:
    """A loss that Python must run hears of an interrupt at once."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, interrupt)

    def loss(params: Any, batch: Any) -> Any:
        while float((params["w"] * batch["x"]).detach().sum()) < 1e9:
            time.sleep(0.01)
        return params["w"].sum()

    try:
        step = zfunc.shard(loss, zfunc.mesh(), capture="dynamic")
        generator = torch.Generator().manual_seed(0)
        state = step.init({"w": torch.ones(3).double()}, optim.sgd(0.5))
        timer.start()
        began = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            step(state, {"x": integers(generator, (3,))})
        assert time.perf_counter() - began < 5.0
        assert zfunc.gather(state.params)["w"].tolist() == [1.0, 1.0, 1.0]
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
