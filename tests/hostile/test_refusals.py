"""Every refusal on virtual ranks and on processes: an error on every rank, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import assert_equal, ranks
from tests.hostile import refused_inputs, refused_losses
from tests.hostile.case import RATE
from tests.hostile.refusal import Refusal, attempt_by_name, loss_fn, refusals_of
from tests.hostile.trees import forward, mlp, rows
from tests.oracle import Oracle, Sgd
from tests.ranks import run_ranks
from zfunc import optim

REFUSALS = [
    pytest.param(module.__name__, name, this, id=f"{module.__name__.split('.')[-1]}.{name}")
    for module in (refused_losses, refused_inputs)
    for name, this in refusals_of(module).items()
]


def check(this: Refusal, outcomes: list[Any]) -> None:
    """The same error on every rank, or that of the rank at fault; then two steps in all."""
    for rank, ((kind, message), params) in enumerate(outcomes):
        own = this.only is None or rank == this.only
        assert kind == (this.error.__name__ if own else "RemoteRankError"), message
        for text in this.texts:
            assert text in message
        if not own:
            assert f"rank {this.only}" in message
        assert_equal(params, two_steps(len(outcomes)))


def two_steps(world: int) -> list[Tensor]:
    oracle = Oracle(loss_fn, mlp(), Sgd(RATE), axes={"shard": world})
    for number in range(2):
        oracle.step([[rows(rank, number)] for rank in range(world)])
    return oracle.tensors


@pytest.mark.parametrize(("module", "name", "this"), REFUSALS)
def test_virtual_ranks(module: str, name: str, this: Refusal) -> None:
    for world in worlds(this):
        check(this, ranks(world, attempt_by_name, module, name))


@pytest.mark.parametrize(("module", "name", "this"), REFUSALS)
def test_processes(module: str, name: str, this: Refusal) -> None:
    for world in worlds(this):
        check(this, run_ranks(world, attempt_by_name, module, name))


def worlds(this: Refusal) -> range:
    """Those that have the rank at fault."""
    return range(max(this.least, (this.only or 0) + 1), 5)


def test_an_operator_without_a_derivative_is_not_taken_for_a_constant() -> None:
    """Traced, its gradient would be zero; plain torch warns, and looks inside of it."""
    library = torch.library.Library("hostile_derivative", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("hostile_derivative::double", torch.empty_like, lib=library)

    def loss(p: Any, b: Any) -> Tensor:
        return torch.ops.hostile_derivative.double(forward(p, b["x"])).sum()

    step = zfunc.shard(loss, zfunc.mesh(), capture="traced")
    state = step.init(mlp(), optim.sgd(RATE))
    with (
        pytest.warns(UserWarning, match="autograd kernel was not registered"),
        pytest.raises(zfunc.CaptureError, match=r"(?s)double.*test_refusals.py.*register_autograd"),
    ):
        step(state, rows(0, 0))
    step = zfunc.shard(loss, zfunc.mesh())
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        state, _ = step(state, rows(0, 0))
    oracle = Oracle(lambda p, b: 2 * forward(p, b["x"]).sum(), mlp(), Sgd(RATE), axes={"shard": 1})
    oracle.step([[rows(0, 0)]])
    assert_equal(list(zfunc.gather(state.params).values()), oracle.tensors)
