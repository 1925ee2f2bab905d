"""A rank that is killed or stopped at any op of a step: named, with the step, on all others.

Each run has processes of its own; they mostly wait, so several go at a time.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import zfunc
from tests.faults.case import CASES, Case, Training, act_at, report
from tests.harness import assert_equal, bits, ranks
from tests.ranks import Outcome, spawn_ranks

TIMEOUT_S = 5.0
SLACK_S = 10.0  # following the chain of blame, on a machine that is busy with others
ANSWER_S = 60.0
AT_ONCE = 8
LOST = CASES | {"tight": dataclasses.replace(CASES["tight"], accum=1)}  # half as many ops


def lose(mesh: zfunc.Mesh, case: Case, how: int, at: int, limit: int) -> Any:
    """Loses the last rank at an op of its second step; a survivor says what it saw of two calls."""
    training = Training(mesh, case, limit=limit)
    training.step()
    before, executor = bits(training.state.params), training.executor
    if mesh.rank == mesh.size - 1:
        act_at(executor, at, lambda: os.kill(os.getpid(), how))
    seen = []
    for _ in range(2):
        started = time.perf_counter()
        (name, text), number = report(training.step), int(training.state.step)
        seen.append((name, text, number, time.perf_counter() - started))
        if name and number == 1 and at <= training.commit_at:
            assert_equal(bits(training.state.params), before)
    return seen


def places(mesh: zfunc.Mesh, case: Case) -> tuple[int, int, int]:
    """The number of ops of a step on this rank, which is the commit point, the budget."""
    training = Training(mesh, case)
    training.step()
    executor = training.executor
    return len(executor.schedule), training.commit_at, executor.program.limit_bytes or 0


def run(case: Case, how: signal.Signals, at: int, limit: int) -> list[Outcome]:
    """What became of the survivors."""
    with spawn_ranks(
        case.world, lose, case, how, at, limit, axes=case.axes, mesh_timeout_s=TIMEOUT_S
    ) as spawned:
        return spawned.outcomes(case.world - 1, timeout_s=ANSWER_S)


def check(case: Case, at: int, commit_at: int, outcomes: list[Outcome]) -> None:
    """Compares what the survivors saw with what they should have seen."""
    victim = case.world - 1
    assert len(outcomes) == victim
    for outcome in outcomes:
        assert not outcome.text, f"at op {at}: {outcome.text}"
        (name, text, number, seconds), (later, again, _, soon) = outcome.value
        if at > commit_at and not name:  # it had sent all that this step needed
            assert number == 2
            name, text, seconds = later, again, soon
        else:
            assert later == "RankLostError" and soon < 1.0  # no second wait
        assert name == "RankLostError", f"at op {at}: {name} {text}"
        where = f"step {number}: rank {victim} was lost"
        assert text.startswith(where), f"at op {at}: {text}"
        assert seconds < TIMEOUT_S + SLACK_S


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_at_every_op(name: str, how: signal.Signals) -> None:
    case = LOST[name]
    num_ops, commit_at, limit = ranks(case.axes, places, case)[-1]
    chosen = range(num_ops)
    assert num_ops > commit_at > 2
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for at, outcomes in zip(
            chosen, pool.map(lambda at: run(case, how, at, limit), chosen), strict=True
        ):
            check(case, at, commit_at, outcomes)
