"""Agreement: a rank that fails or differs is an error on every rank, and the state stays valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc
from tests.adversary import InjectedFault, adversary
from tests.harness import assert_equal, bits, gathered, ranks
from tests.oracle import Oracle, Sgd
from zfunc import optim

HSDP = {"replica": 2, "shard": 2}
RATE = 2.0**-8


def params() -> dict[str, Tensor]:
    return {"emb": torch.arange(12.0).view(4, 3), "w": torch.ones(3, 3), "b": torch.ones(3)}


def loss_fn(params: Any, index: Tensor) -> Tensor:
    """Fails while it runs, not while it is captured, if an index is out of range."""
    h = F.embedding(index, params["emb"])
    return ((h @ params["w"] + params["b"]) ** 2).mean()


def weighted_loss(params: Any, index: Tensor) -> Any:
    loss = loss_fn(params, index)
    return loss * 2, torch.tensor(2.0)


def good(rank: int) -> Tensor:
    return torch.tensor([rank % 4, 1])


BAD = torch.tensor([99, 1])


def outcome(call: Callable[[], Any]) -> str:
    """The type and first line of what a call raised."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "returned"


def one_step(axes: Any, **options: Any) -> list[Tensor]:
    """The parameters after one good step, from the oracle."""
    world = 1
    for size in axes.values():
        world *= size
    oracle = Oracle(loss_fn, params(), Sgd(RATE), axes=axes)
    oracle.step([[good(rank)] * options.get("accum", 1) for rank in range(world)])
    return oracle.tensors


def check_recovery(mesh: zfunc.Mesh, step: Any, state: Any, call: Any, batch: Any) -> Any:
    """What `call` raised, and the leaves after a good step from the untouched state."""
    kept = bits(state)
    generator = torch.get_rng_state()
    said = outcome(call)
    assert_equal(bits(state), kept)
    assert torch.equal(torch.get_rng_state(), generator)
    state, metrics = step(state, batch)
    assert int(metrics["skipped"]) == 0
    return said, gathered(state.params)


@pytest.mark.parametrize(
    "specs", [zfunc.zero(1), zfunc.zero(2), zfunc.zero(3)], ids=["1", "2", "3"]
)
@pytest.mark.parametrize("axes", [{"shard": 2}, HSDP], ids=str)
@pytest.mark.parametrize("accum", [1, 2])
def test_a_rank_that_fails_in_mid_step(axes: Any, specs: Any, accum: int) -> None:
    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss_fn, mesh, specs=specs, accum=accum)
        state = step.init(params(), optim.sgd(RATE))
        last = BAD if mesh.rank == 1 else good(mesh.rank)
        right = [good(mesh.rank)] * accum
        bad, batch = ([*right[1:], last], right) if accum > 1 else (last, right[0])
        return check_recovery(mesh, step, state, lambda: step(state, bad), batch)

    expected = one_step(axes, accum=accum)
    for rank, (said, after) in enumerate(ranks(axes, run)):
        if rank == 1:
            assert said.startswith("IndexError: index out of range")
        else:
            assert said.startswith(
                "RemoteRankError: step 0 failed on rank 1: IndexError: index out"
            )
        assert_equal(after, expected)


@pytest.mark.parametrize("call", ["step", "value_and_grad", "remat", "weighted"])
def test_every_call_that_runs_a_loss_survives_a_failing_rank(call: str) -> None:
    def run(mesh: zfunc.Mesh) -> Any:
        loss = weighted_loss if call == "weighted" else loss_fn
        remat = zfunc.policies.nothing if call == "remat" else None
        step = zfunc.shard(loss, mesh, remat=remat)
        state = step.init(params(), optim.sgd(RATE))
        bad = BAD if mesh.rank == 0 else good(mesh.rank)

        def fail() -> Any:
            if call == "value_and_grad":
                return step.value_and_grad(state.params, bad)
            return step(state, bad)

        return check_recovery(mesh, step, state, fail, good(mesh.rank))

    (one, after), (other, same) = ranks(2, run)
    assert one.startswith("IndexError: index out of range")
    assert other.startswith("RemoteRankError")
    assert "failed on rank 0: IndexError: index out of range" in other
    assert_equal(after, same)
    assert_equal(after, one_step({"shard": 2}))


def test_several_ranks_fail() -> None:
    def run(mesh: zfunc.Mesh) -> str:
        step = zfunc.shard(loss_fn, mesh)
        state = step.init(params(), optim.sgd(RATE))
        return outcome(lambda: step(state, good(mesh.rank) if mesh.rank == 1 else BAD))

    zero, one, two = ranks(3, run)
    assert zero.startswith("IndexError") and two.startswith("IndexError")
    assert one.startswith("RemoteRankError: step 0 failed on rank 0 (and on ranks [2]): IndexError")


def test_the_error_names_the_rank() -> None:
    def run(mesh: zfunc.Mesh) -> int:
        step = zfunc.shard(loss_fn, mesh)
        state = step.init(params(), optim.sgd(RATE))
        if mesh.rank == 2:
            with pytest.raises(IndexError):
                step(state, BAD)
            return -1
        with pytest.raises(zfunc.RemoteRankError, match="state from before the call is valid") as e:
            step(state, good(0))
        return e.value.rank

    assert ranks(3, run) == [2, 2, -1]


@pytest.mark.parametrize("kind", ["loss", "batch", "dtype", "accum"])
def test_a_rank_that_fails_before_it_communicates(kind: str) -> None:
    def loss(params: Any, batch: Any) -> Tensor:
        if batch.shape[0] == 3:
            raise ZeroDivisionError("nothing to divide")
        return loss_fn(params, batch)

    wrong: dict[str, Any] = {
        "loss": torch.tensor([1, 1, 1]),
        "batch": torch.ones(2, device="meta").long(),
        "dtype": torch.tensor([1.5, 1.0]),
        "accum": {"x": {1, 2}},
    }

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh)
        state = step.init(params(), optim.sgd(RATE))
        bad = wrong[kind] if mesh.rank == 1 else good(mesh.rank)
        return check_recovery(mesh, step, state, lambda: step(state, bad), good(mesh.rank))

    (one, after), (other, same) = ranks(2, run)
    assert one.startswith("RemoteRankError: step 0 failed on rank 1: " + other[:30])
    assert not other.startswith("RemoteRankError")
    assert_equal(after, same)
    assert_equal(after, one_step({"shard": 2}))


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("capture", ["auto", "dynamic"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Mute, "Mute: (no message: its __str__ raises ZeroDivisionError)"),
        (lambda: ValueError("a\udc80b"), r"ValueError: a\udc80b"),
        (lambda: ValueError("x" * 10**6), "ValueError: xxx"),
    ],
    ids=["mute", "surrogate", "endless"],
)
def test_exceptions_whose_message_cannot_be_sent(
    make: Callable[[], Exception], said: str, capture: str
) -> None:
    error = make()  # here: what was raised holds the tensors of its frames

    def loss(params: Any, index: Tensor) -> Tensor:
        if index.shape[0] == 3:
            raise error
        return loss_fn(params, index)

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss, mesh, capture=capture)
        state = step.init(params(), optim.sgd(RATE))
        bad = torch.tensor([1, 1, 1]) if mesh.rank == 1 else good(mesh.rank)
        message = ""
        try:
            step(state, bad)
        except zfunc.RemoteRankError as remote:
            message = str(remote)
        except type(error):
            pass
        state, _ = step(state, good(mesh.rank))
        return message, gathered(state.params)

    (one, after), (other, same) = ranks(2, run)
    assert said in one and len(one) < 50_000 and not other
    assert_equal(after, same)
    assert_equal(after, one_step({"shard": 2}))


def _settings(rank: int) -> dict[str, tuple[dict[str, Any], Any, str]]:
    odd = rank == 1
    return {
        "rate": ({}, optim.sgd(RATE * (1 + odd)), "init: ranks were called with different"),
        "specs": ({"specs": zfunc.zero(1 if odd else 3)}, None, "init: ranks were called with"),
        "trainable": ({"trainable": not odd}, None, "init: ranks were called with different"),
        "nonfinite": ({"nonfinite": "raise" if odd else "skip"}, None, "step 0: ranks were called"),
    }


@pytest.mark.parametrize("kind", _settings(0))
def test_settings_that_differ_are_an_error_on_every_rank(kind: str) -> None:
    def run(mesh: zfunc.Mesh) -> str:
        options, tx, _ = _settings(mesh.rank)[kind]
        step = zfunc.shard(loss_fn, mesh, **options)

        def call() -> None:
            state = step.init(params(), tx or optim.sgd(RATE))
            step(state, good(mesh.rank))

        return outcome(call)

    expected = "ProgramMismatchError: " + _settings(0)[kind][2]
    assert all(said.startswith(expected) for said in ranks(2, run))


def test_ranks_at_different_steps_are_found_out() -> None:
    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss_fn, mesh, donate=False)
        first = step.init(params(), optim.sgd(RATE))
        second, _ = step(first, good(mesh.rank))
        mine = first if mesh.rank else second
        with pytest.raises(zfunc.ProgramMismatchError, match=r"(?s)different settings.*rank 1"):
            step(mine, good(mesh.rank))
        third, _ = step(second, good(mesh.rank))
        return gathered(third.params)

    one, other = ranks(2, run)
    assert_equal(one, other)


def test_ranks_that_accumulate_differently_are_found_out() -> None:
    def run(mesh: zfunc.Mesh) -> str:
        accum = 1 + mesh.rank
        step = zfunc.shard(loss_fn, mesh, accum=accum)
        state = step.init(params(), optim.sgd(RATE))
        batch = [good(0)] * accum if accum > 1 else good(0)
        return outcome(lambda: step(state, batch))

    for said in ranks(2, run):
        assert said.startswith("ProgramMismatchError: step 0: ranks were called with different")


def test_different_calls_are_an_error_and_no_hang() -> None:
    def run(mesh: zfunc.Mesh) -> str:
        step = zfunc.shard(loss_fn, mesh)
        state = step.init(params(), optim.sgd(RATE))
        if mesh.rank == 0:
            return outcome(lambda: step(state, good(0)))
        return outcome(lambda: step.value_and_grad(state.params, good(1)))

    assert all(said.startswith("ProgramMismatchError") for said in ranks(2, run))


def test_a_rank_that_stops_early_is_an_error_and_no_hang() -> None:
    def run(mesh: zfunc.Mesh) -> str:
        step = zfunc.shard(loss_fn, mesh)
        state = step.init(params(), optim.sgd(RATE))
        return "gone" if mesh.rank == 1 else outcome(lambda: step(state, good(0)))

    one, other = ranks(2, run)
    assert other == "gone"
    assert one.startswith("RankLostError: step 0: rank 1 ended while rank 0 waited")


def num_calls(mesh: zfunc.Mesh) -> tuple[int, int]:
    """How many calls of the communicator init and one step make."""
    watched = adversary(mesh, 0)
    step = zfunc.shard(loss_fn, watched)
    state = step.init(params(), optim.sgd(RATE))
    after_init = watched.comm.calls
    step(state, good(mesh.rank))
    return after_init, watched.comm.calls


def test_a_fault_of_the_network_at_any_call_of_a_step_ends_every_rank() -> None:
    (start, stop), _ = ranks(2, num_calls)
    assert stop - start >= 4

    def run(mesh: zfunc.Mesh, call: int) -> Any:
        faulty = adversary(mesh, 3, fail_at=call, rank=1)
        step = zfunc.shard(loss_fn, faulty)
        state = step.init(params(), optim.sgd(RATE))
        kept = bits(state)
        said = outcome(lambda: step(state, good(mesh.rank)))
        assert_equal(bits(state), kept)
        return said

    for call in range(start, stop):
        one, other = ranks(2, run, call)
        assert other.startswith(InjectedFault.__name__), call
        told = ("RemoteRankError", "RankLostError", "ProgramMismatchError")
        assert one.startswith(told), (call, one)


def test_a_mid_step_failure_under_late_and_shuffled_communication() -> None:
    def run(mesh: zfunc.Mesh, seed: int) -> Any:
        step = zfunc.shard(loss_fn, adversary(mesh, seed))
        state = step.init(params(), optim.sgd(RATE))
        bad = BAD if mesh.rank == 1 else good(0)
        return check_recovery(mesh, step, state, lambda: step(state, bad), good(mesh.rank))

    for seed in range(3):
        (one, after), (other, same) = ranks(2, run, seed)
        assert one.startswith("RemoteRankError") and other.startswith("IndexError")
        assert_equal(after, same)
        assert_equal(after, one_step({"shard": 2}))


@pytest.mark.parametrize("specs", [zfunc.zero(1), zfunc.zero(3)], ids=["1", "3"])
def test_ranks_may_use_different_leaves(specs: Any) -> None:
    """Each rank's branch reads leaves of its own; the mean gradient is that of all."""

    def loss(params: Any, batch: Any) -> Tensor:
        which, x = batch
        h = x * params["b"]
        return (h @ params["w"]).sum() if which == "w" else (h * params["emb"][which]).sum()

    data: list[list[Any]] = [[("w", torch.arange(3.0))], [(2, torch.ones(3))], [(0, torch.ones(3))]]
    oracle = Oracle(loss, params(), Sgd(RATE), axes={"shard": 3})
    for _ in range(2):
        oracle.step(data)

    def run(mesh: zfunc.Mesh) -> list[Tensor]:
        step = zfunc.shard(loss, mesh, specs=specs)
        state = step.init(params(), optim.sgd(RATE))
        for _ in range(2):
            state, _ = step(state, data[mesh.rank][0])
        return gathered(state.params)

    for after in ranks(3, run):
        assert_equal(after, oracle.tensors)
