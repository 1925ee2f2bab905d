"""A rank that raises at any op of a step: an error everywhere, the old state valid, and on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfunc
from tests.faults.case import CASES, Case, Training, act_at, expected, fault, report
from tests.harness import assert_equal, ranks
from tests.ranks import run_ranks, spawn_ranks
from zfunc.program.ir import Update

NO_ERROR = ("", "")


def disturb(mesh: zfunc.Mesh, case: Case) -> Any:
    """Fails at every op up to the commit point, ranks in turn; every third time a step follows."""
    training = Training(mesh, case)
    training.step()
    assert mesh.comm is not None
    ends = [int(row) for row in mesh.comm.exchange(str(training.commit_at).encode())]
    seen, leaves = [], []
    for at in range(max(ends) + 1):
        failing = max(
            range(mesh.size), key=lambda rank: (at <= ends[rank], (rank + at) % mesh.size)
        )
        message = f"fault at op {at}"
        if mesh.rank == failing:
            act_at(training.executor, at, fault(message))
        seen.append((failing, message, int(training.state.step), report(training.step)))
        if at % 3 == 0 or at == max(ends):
            training.step()
            leaves.append(training.leaves())
    return ends, seen, leaves


def check(case: Case, results: list[Any]) -> None:
    """Compares what every rank saw with what it should have seen."""
    ends, _, leaves = results[0]
    assert min(ends) > 3
    wanted = expected(case, len(leaves) + 1)[1:]
    for rank, (_, seen, leaves) in enumerate(results):
        for failing, message, number, (name, text) in seen:
            if rank == failing:
                assert (name, text) == ("ArithmeticError", message)
            else:
                assert name == "RemoteRankError", (name, text)
                said = f"step {number} failed on rank {failing}: ArithmeticError: {message}"
                assert text.startswith(said)
        for got, tensors in zip(leaves, wanted, strict=True):
            assert_equal(got, tensors)


@pytest.mark.parametrize("name", CASES)
def test_at_every_op_on_processes(name: str) -> None:
    case = CASES[name]
    check(case, run_ranks(case.world, disturb, case, axes=case.axes))


@pytest.mark.parametrize("name", CASES)
def test_at_every_op_on_virtual_ranks(name: str) -> None:
    check(CASES[name], ranks(CASES[name].axes, disturb, CASES[name]))


def forward(mesh: zfunc.Mesh) -> Any:
    """A function without a derivative that fails on rank 0 at every op in turn."""
    params = zfunc.scatter({"w": torch.arange(6.0), "v": torch.arange(3.0)}, mesh, zfunc.Flat())
    call = zfunc.infer(lambda p, x: (p["w"].sum() * x, p["v"].sum() + x), mesh)
    x = torch.tensor(float(mesh.rank))
    seen = [call(params, x)]
    executor = call._programs.compiled[-1].executor
    for at in range(len(executor.schedule)):
        if mesh.rank == 0:
            act_at(executor, at, fault(f"fault at op {at}"))
        try:
            seen.append(call(params, x))
        except ArithmeticError as error:
            seen.append(str(error))
    return [*seen, call(params, x)]


def test_a_function_that_fails_on_one_rank_gives_the_others_their_values() -> None:
    failing, other = ranks(2, forward)
    assert failing[0] == failing[-1] == (0.0, 3.0)
    assert failing[1:-1] == [f"fault at op {at}" for at in range(len(failing) - 2)]
    assert len(other) == len(failing) > 5
    assert all(value == (15.0, 4.0) for value in other)


def fail_in_update(mesh: zfunc.Mesh, case: Case) -> Any:
    training = Training(mesh, case)
    training.step()
    at = next(i for i, op in enumerate(training.executor.schedule) if isinstance(op, Update))
    if mesh.rank == 1:
        act_at(training.executor, at, fault("no memory"))
    seen = [report(training.step)]
    seen += [report(training.step), report(training.step)]
    return [(name, text.splitlines()[0] if text else "") for name, text in seen]


def test_a_fault_after_the_commit_point_is_terminal_on_every_rank() -> None:
    """The rank that failed lacks the step that the others have: no later call can succeed."""
    other, failing = ranks(2, fail_in_update, CASES["tight"])
    assert failing[0] == ("ArithmeticError", "no memory")
    assert other[0] == NO_ERROR
    differs = "ranks were called with different settings"
    for (name, text), (name_other, text_other) in zip(failing[1:], other[1:], strict=True):
        assert name == name_other == "ProgramMismatchError"
        assert text.endswith(differs)
        assert text_other.endswith(differs)


def fail_in_update_and_return(mesh: zfunc.Mesh, case: Case) -> Any:
    training = Training(mesh, case)
    training.step()
    at = next(i for i, op in enumerate(training.executor.schedule) if isinstance(op, Update))
    if mesh.rank == 1:
        act_at(training.executor, at, fault("no memory"))
    return report(training.step), report(training.step)


def test_a_fault_before_the_gathers_of_an_update_is_terminal_too() -> None:
    """Virtual ranks see at once that their calls no longer fit; processes after the timeout."""
    for got, word in ((ranks, "ProgramMismatchError"), (on_processes, "RankLostError")):
        (first, again), failing = got(2, fail_in_update_and_return, CASES["zero 1"])
        assert failing[0] == ("ArithmeticError", "no memory")
        assert {first[0], again[0], failing[1][0]} == {word}
        if word == "RankLostError":
            assert first[1].startswith("step 1: rank 1 ")  # each waits for the other


def on_processes(world: int, fn: Any, case: Case) -> list[Any]:
    with spawn_ranks(world, fn, case, mesh_timeout_s=2.0) as spawned:
        outcomes = spawned.outcomes(world, timeout_s=60.0)
    return [outcome.value for outcome in outcomes]


def fail_in_capture(mesh: zfunc.Mesh) -> Any:
    """Rank 0 fails while others wait to agree: in its loss, in its batch, in its state."""
    training = Training(mesh, CASES["tight"])
    training.step()
    old = training.state
    training.step()
    seen = []
    good = training.run

    def disturbed(state: Any, batch: Any) -> Any:
        return good(old if mesh.rank == 0 else state, batch)

    training.run = disturbed
    seen.append(report(training.step))
    training.run = lambda state, batch: good(state, batch[:1] if mesh.rank == 0 else batch)
    seen.append(report(training.step))
    training.run = good
    training.step()
    return seen, training.leaves()


def test_a_fault_before_ranks_agree_is_one_everywhere() -> None:
    results = ranks(2, fail_in_capture)
    own, other = (seen for seen, _ in results)
    assert [name for name, _ in own] == ["DonatedStateError", "LayoutError"]
    assert [name for name, _ in other] == ["RemoteRankError"] * 2
    for (name, text), (_, said) in zip(own, other, strict=True):
        assert said.startswith(f"step 2 failed on rank 0: {name}: {text.splitlines()[0]}")
    for _, leaves in results:
        assert_equal(leaves, expected(CASES["tight"], 3)[-1])
