"""The pool of real ranks that other tests stand on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.ranks import RanksError, run_ranks, spawn_ranks
from zfunc.errors import RankLostError


def who(mesh, *args):
    return os.getpid(), mesh.rank, mesh.size, args


def test_ranks_live_on_from_call_to_call():
    first = run_ranks(2, who, 7)
    second = run_ranks(4, who)
    assert [result[1:] for result in first] == [(0, 2, (7,)), (1, 2, (7,))]
    assert [result[1:3] for result in second] == [(rank, 4) for rank in range(4)]
    assert [result[0] for result in first] == [result[0] for result in second[:2]]


def raise_on(mesh, ranks):
    print(f"rank {mesh.rank} was here")
    if mesh.rank in ranks:
        raise ValueError(f"of rank {mesh.rank}")
    mesh.comm.exchange(b"")


def test_the_lowest_ranks_own_exception_is_raised_with_every_ranks_text():
    with pytest.raises(ValueError, match="of rank 1") as caught:
        run_ranks(3, raise_on, (1, 2))
    report = str(caught.value.__cause__)
    assert "--- rank 2: Traceback" in report
    assert "rank 0 was here" in report
    assert len(run_ranks(3, who)) == 3  # a new pool


def unsendable(mesh):
    return lambda: mesh


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RanksError, match="Can't pickle"):
        run_ranks(1, unsendable)


def end(mesh):
    if mesh.rank == 1:
        os._exit(3)
    time.sleep(60)


def test_a_rank_that_dies_is_an_error_at_once():
    started = time.monotonic()
    with pytest.raises(RanksError, match="died with exit code 3"):
        run_ranks(2, end)
    assert time.monotonic() - started < 30


def sleep(mesh):
    time.sleep(60)


def test_a_call_has_a_deadline():
    with pytest.raises(RanksError, match="no answer within 1 s"):
        run_ranks(1, sleep, timeout_s=1)


def wait_for_peer(mesh):
    if mesh.rank == 1:
        time.sleep(60)
    try:
        mesh.comm.exchange(b"")
    except RankLostError as error:
        return str(error)


def test_spawned_ranks_may_be_killed_from_outside():
    with spawn_ranks(2, wait_for_peer, mesh_timeout_s=20) as ranks:
        time.sleep(1.0)
        ranks.kill(1)
        survivor, dead = ranks.outcomes(2, timeout_s=60)
    assert "rank 1" in survivor.value or "ranks [1]" in survivor.text
    assert dead.text == f"died with exit code {-signal.SIGKILL}"
