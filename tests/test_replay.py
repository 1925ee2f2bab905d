"""Replay: a second call draws what the first one drew, whatever it draws from."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import gathered
from zfunc import optim
from zfunc.replay import noting_and_replaying

GENERATOR = torch.Generator()

SOURCES: dict[str, Callable[[], float]] = {
    "generator": lambda: torch.rand((), generator=GENERATOR).item(),
    "method": lambda: torch.empty(()).uniform_(generator=GENERATOR).item(),
    "numpy": lambda: float(numpy.random.rand()),
    "python": random.random,
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_second_call_repeats_the_first_and_leaves_no_trace(source: str) -> None:
    draw = SOURCES[source]
    draw()
    first, second = noting_and_replaying()
    with first:
        numbers = [draw(), draw()]
    between = draw()
    with second:
        assert [draw(), draw()] == numbers
    after = draw()
    assert len({*numbers, between, after}) == 4


@pytest.mark.parametrize("source", SOURCES)
def test_it_repeats_as_often_as_it_is_asked_to(source: str) -> None:
    """Gradients of gradients compute a block again twice, and within itself."""
    draw = SOURCES[source]
    first, second = noting_and_replaying()
    with first:
        numbers = [draw(), draw()]
    between = draw()
    for _ in range(2):
        with second:
            assert draw() == numbers[0]
            with second:
                assert [draw(), draw()] == numbers
            assert draw() == numbers[1]
    assert draw() not in (*numbers, between)


def test_a_generator_made_inside_is_made_again() -> None:
    def draw() -> float:
        return torch.rand((), generator=torch.Generator().manual_seed(3)).item()

    first, second = noting_and_replaying()
    with first:
        number = draw()
    with second:
        assert draw() == number


@pytest.mark.parametrize("source", SOURCES)
def test_gradients_on_the_dynamic_rung_are_those_without_remat(source: str) -> None:
    batch = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def grads(wrap: Callable[..., Callable[[Tensor], Tensor]]) -> list[Tensor]:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            block = wrap(lambda x: torch.tanh(x @ w * SOURCES[source]()).sin())
            return block(block(x)).sum()

        GENERATOR.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        step = zfunc.shard(loss, zfunc.mesh(), capture="dynamic")
        state = step.init(torch.eye(2) / 2, optim.sgd(0.1))
        return gathered(step.value_and_grad(state.params, batch)[1])

    (plain,), (again,) = grads(lambda fn: fn), grads(zfunc.remat)
    assert torch.equal(plain, again)
