"""A rank that fails while ranks whose programs differ settle on one sequence of collectives."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest

import zfunc
import zfunc.passes.union
import zfunc.passes.whole
import zfunc.resolve
from tests.harness import assert_equal, gathered, ranks
from tests.ranks import run_ranks
from tests.test_resolve import NAMES, RATE, batch, dense, loss, params
from zfunc import optim
from zfunc.programs import Bounded

FILES = [module.__file__ for module in (zfunc.resolve, zfunc.passes.union, zfunc.passes.whole)]
# What puts exchanges in a row; what they exchange is made by calls of other functions. A generator
# that is closed counts as called.
FRAME = {"resolve", "_telling", "_negotiate", "<genexpr>"}


class FailsAt:
    """A profile function: one of the calls that its thread makes inside of `FILES` raises."""

    def __init__(self, at: int):
        self.left = at

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename not in FILES or code.co_name in FRAME:
            return
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            raise MemoryError(f"no room in {code.co_name}")


def failing(mesh: zfunc.Mesh, rows: list[Any], only: int, settled: bool) -> Any:
    """One rank fails at every call in turn, until it has made them all.

    Args:
        rows: every rank's batch.
        only: which rank.
        settled: whether what ranks settled on is known, and only what was built is forgotten.
    """
    step = zfunc.shard(loss, mesh)
    state = step.init(params(), optim.sgd(RATE))
    programs = step._training.programs
    seen = []
    while not seen or seen[-1]:
        programs.resolved = Bounded(8)
        if not settled:
            programs.agreed = Bounded(8)
        elif not seen:
            step.value_and_grad(state.params, rows[mesh.rank])
            programs.resolved = Bounded(8)
        said = ""
        sys.setprofile(FailsAt(len(seen)) if mesh.rank == only else None)
        try:
            step.value_and_grad(state.params, rows[mesh.rank])
        except (MemoryError, zfunc.RemoteRankError) as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            sys.setprofile(None)
        seen.append(said)
    state, _ = step(state, rows[mesh.rank])
    return seen[:-1], gathered(state.params)


@pytest.mark.parametrize(
    ("look", "settled", "only"),
    [(False, False, 0), (True, False, 1), (False, True, 1), (True, True, 0)],
    ids=["union", "whole", "settled union", "settled whole"],
)
def test_a_rank_that_fails_while_it_settles_is_an_error_everywhere(
    look: bool, settled: bool, only: int
) -> None:
    """Whatever fails on one rank, no other waits for it until the timeout, and all may go on."""
    rows = [batch(0, NAMES[:4]), batch(1, NAMES[1:5], look=look)]
    results = ranks(2, failing, rows, only, settled)
    for rank, (seen, after) in enumerate(results):
        assert len(seen) > 10
        for text, own in zip(seen, results[only][0], strict=True):
            message = own.removeprefix("MemoryError: ")
            remote = f"RemoteRankError: value_and_grad failed on rank {only}: "
            assert text.startswith(own if rank == only else remote)
            assert message.startswith("no room in ") and message in text
        assert_equal(after, dense(rows))


def forgetting(mesh: zfunc.Mesh) -> Any:
    """Rank 1 cannot build a union, when it is new and when it was forgotten."""
    rows = [batch(0, NAMES[:4]), batch(1, NAMES[1:5])]
    step = zfunc.shard(loss, mesh)
    state = step.init(params(), optim.sgd(RATE))
    original, seen = zfunc.resolve.with_ghosts, []
    for fails in (True, False, True, False):
        broken = mock.Mock(side_effect=MemoryError("no room"))
        if mesh.rank == 1:
            step._training.programs.resolved = Bounded(8)
        builder = broken if fails and mesh.rank == 1 else original
        try:
            with mock.patch.object(zfunc.resolve, "with_ghosts", builder):
                state, _ = step(state, rows[mesh.rank])
        except (MemoryError, zfunc.RemoteRankError) as caught:
            seen.append(f"{type(caught).__name__}: {caught}")
    return seen, gathered(state.params)


def test_a_rank_that_cannot_build_a_union_is_an_error_on_every_process() -> None:
    rows = [batch(0, NAMES[:4]), batch(1, NAMES[1:5])]
    for rank, (seen, after) in enumerate(run_ranks(2, forgetting)):
        for number, text in enumerate(seen):
            word = "MemoryError" if rank else f"RemoteRankError: step {number} failed on rank 1"
            assert text.startswith(word) and "no room" in text
        assert len(seen) == 2
        assert_equal(after, dense(rows, 2))
