"""Dead, frozen and absent ranks: an error that names them, on every survivor, in bounded time."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests.ranks import spawn_ranks
from zfunc.errors import RankLostError

TIMEOUT_S = 2.0
SLACK_S = 6.0  # following the chain of blame, and a busy machine
ANSWER_S = 60.0  # the processes must start first


def gather(mesh, numel):
    size = mesh.size
    mesh.comm.gather("shard", [torch.zeros(numel)], [torch.zeros(size * numel)]).wait()


def reduce(mesh, numel):
    size = mesh.size
    mesh.comm.reduce("shard", [torch.zeros(size * numel)], [torch.zeros(numel)]).wait()


def all_reduce(mesh, numel):
    mesh.comm.all_reduce("shard", [torch.zeros(numel)], [torch.zeros(numel)]).wait()


def exchange(mesh, numel):
    mesh.comm.exchange(bytes(numel))


CALLS = {"gather": gather, "reduce": reduce, "all_reduce": all_reduce, "exchange": exchange}


def lose(mesh, how, call, numel):
    """Makes a call once without and once with the last rank; the survivors say what they saw."""
    CALLS[call](mesh, numel)
    if mesh.rank == mesh.size - 1:
        os.kill(os.getpid(), how)
    started = time.perf_counter()
    try:
        CALLS[call](mesh, numel)
    except RankLostError as error:
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        with pytest.raises(RankLostError, match="was lost"):
            exchange(mesh, 1) if call == "exchange" else gather(mesh, 1)
        mesh.comm.drain()
        return str(error), seconds, time.perf_counter() - started
    return "nothing", 0.0, 0.0


KILLED, FROZEN = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.parametrize(
    ("how", "call"),
    [*((KILLED, call) for call in CALLS), (FROZEN, "all_reduce"), (FROZEN, "exchange")],
)
def test_a_lost_rank_is_named_in_time(how, call):
    numel = 200 if call == "exchange" else 200_000
    with spawn_ranks(3, lose, how, call, numel, mesh_timeout_s=TIMEOUT_S) as ranks:
        survivors = ranks.outcomes(2, timeout_s=ANSWER_S)
    for outcome in survivors:
        assert not outcome.text, outcome.text
        text, seconds, again = outcome.value
        first = text.splitlines()[0]  # perhaps by way of the other survivor
        assert first.startswith("rank 2 was lost") and call in first, text
        assert seconds < TIMEOUT_S + SLACK_S
        assert again < 1.0  # known to be lost: no second wait


def lose_across(mesh):
    """Rank 3 freezes; rank 0 shares no axis with it, and waits for rank 1, which waits for it."""
    if mesh.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    axis = "replica" if mesh.rank == 1 else "shard"
    try:
        mesh.comm.all_reduce(axis, [torch.ones(1)], [torch.zeros(1)]).wait()
    except RankLostError as error:
        return str(error)
    return "nothing"


def test_blame_passes_on_to_the_rank_at_the_end_of_the_chain():
    axes = {"replica": 2, "shard": 2}
    with spawn_ranks(4, lose_across, axes=axes, mesh_timeout_s=TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(3, timeout_s=ANSWER_S)
    for outcome in outcomes:
        assert not outcome.text, outcome.text
    problems = [outcome.value.splitlines()[0] for outcome in outcomes]
    assert problems[0].startswith("rank 3 was lost: rank 1 waited for it, this one in all_reduce 0")
    assert problems[1].startswith("rank 3 was lost during all_reduce 0")
    assert problems[2].startswith("rank 3 was lost during all_reduce 0")


def differ(mesh):
    """Rank 1 makes another call: other sizes, which gloo itself answers by ending the process."""
    numel = 100_000 if mesh.rank else 100
    try:
        gather(mesh, numel)
    except RankLostError as error:
        return str(error)
    return "nothing"


def test_calls_of_different_sizes_time_out_and_overwrite_nothing():
    with spawn_ranks(2, differ, mesh_timeout_s=TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(2, timeout_s=ANSWER_S)
    for rank, outcome in enumerate(outcomes):
        assert not outcome.text, outcome.text
        assert f"rank {1 - rank}" in outcome.value, outcome.value


def finish_early(mesh, numel):
    """Rank 1 ends as soon as it has what it needs, with rank 0 still reading."""
    full = torch.zeros(2 * numel)
    shard = torch.full((numel,), float(mesh.rank))
    mesh.comm.gather("shard", [shard], [full]).wait()
    if mesh.rank == 1:
        os._exit(0)
    return full[-1].item()


def test_what_a_rank_has_sent_arrives_though_it_ends():
    with spawn_ranks(2, finish_early, 1_000_000, mesh_timeout_s=TIMEOUT_S) as ranks:
        outcome = ranks.outcomes(1, timeout_s=ANSWER_S)[0]
    assert (outcome.value, outcome.text) == (1.0, "")
