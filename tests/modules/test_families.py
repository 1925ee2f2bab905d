"""Models of the transformers library, sharded on two ranks, equal to the module in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.harness import ranks
from tests.modules.families import FAMILIES
from tests.ranks import run_ranks
from zfunc import optim

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def sharded(mesh: Any, name: str, checkpoint: bool) -> tuple[float, dict[str, Tensor], str]:
    """The loss, every gradient and the rung, by a step on this rank."""
    net = FAMILIES[name].make(training=checkpoint)
    if checkpoint:
        net.activation_checkpointing_enable()
    apply_fn, params = zfunc.module(net)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return apply_fn(params, **batch).loss

    step = zfunc.shard(loss_fn, mesh, trainable=apply_fn.trainable)
    state = step.init(params, optim.sgd(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the library says of its own reference kernels
        loss, grads = step.value_and_grad(state.params, FAMILIES[name].batch(mesh.rank))
    rung = step._training.programs.compiled[-1].rung
    return float(loss), zfunc.gather(grads)["params"], rung


def plain(name: str, world: int) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and its gradients by the module itself, without any checkpoint."""
    net = FAMILIES[name].make()
    loss = sum(net(**FAMILIES[name].batch(rank)).loss for rank in range(world)) / world
    named = dict(net.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return loss.item(), dict(zip(named, grads, strict=True))


def compare(results: Any, name: str) -> None:
    loss, grads = plain(name, len(results))
    assert len({float(g.abs().sum()) for g in grads.values()}) > 3  # gradients to compare
    for got, own, rung in results:
        assert rung == FAMILIES[name].rung
        assert got == pytest.approx(loss, rel=1e-12)
        assert sorted(own) == sorted(grads)
        for path, grad in own.items():
            bound = 1e-11 * max(1.0, float(grads[path].abs().max()))
            assert float((grad - grads[path]).abs().max()) <= bound, path


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_the_module(name: str) -> None:
    compare(ranks(2, sharded, name, False), name)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].checkpoints])
def test_blocks_that_the_library_computes_again(name: str) -> None:
    """Under functional_call gradients would be about 100 % off, and the loss right."""
    compare(ranks(2, sharded, name, True), name)


def test_on_processes() -> None:
    for checkpoint in (False, True):
        compare(run_ranks(2, sharded, "gpt2", checkpoint, timeout_s=120), "gpt2")


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].ties])
def test_what_is_tied_is_one_leaf(name: str) -> None:
    apply_fn, params = zfunc.module(FAMILIES[name].make())
    first, *others = FAMILIES[name].ties
    assert first in params["params"] and not set(others) & set(params["params"])
    assert set(apply_fn.names[f"params/{first}"]) == set(FAMILIES[name].ties)
