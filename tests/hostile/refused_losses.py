"""Losses that are refused: what they return, write, and depend on besides their arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zfunc
from tests.hostile import autograd
from tests.hostile.case import RATE, ints
from tests.hostile.refusal import Refusal, loss_refused, refused
from tests.hostile.trees import forward, rows
from zfunc import optim
from zfunc.errors import CaptureError

HERE = __file__.rsplit("/", 1)[-1]

# What a loss returns.


@loss_refused(CaptureError, "0-d floating tensor", "torch.float64 [4]", "loss.mean()")
def a_loss_that_returns_a_vector(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).sum(0)


@loss_refused(CaptureError, "0-d floating tensor", "float", capture="dynamic")
def a_loss_that_returns_a_number_on_the_dynamic_rung(p: Any, b: Any) -> Any:
    return forward(p, b["x"]).sum().item()


@loss_refused(CaptureError, "(sum, weight)", "Tensor, dict", "has_aux=True")
def an_aux_that_was_not_announced(p: Any, b: Any) -> Any:
    return forward(p, b["x"]).sum(), {"h": 1}


@loss_refused(CaptureError, "(loss, aux)", "has_aux=True", has_aux=True)
def an_aux_that_is_missing(p: Any, b: Any) -> Any:
    return forward(p, b["x"]).sum()


# What a loss writes into.

IN_PLACE = ("params['a']", HERE, "clone")


@loss_refused(CaptureError, *IN_PLACE)
def a_write_into_a_parameter(p: Any, b: Any) -> Tensor:
    p["a"].mul_(2)
    return forward(p, b["x"]).sum()


@loss_refused(CaptureError, *IN_PLACE)
def a_write_into_a_parameter_without_gradient(p: Any, b: Any) -> Tensor:
    with torch.no_grad():
        p["a"].t()[0] = 1
    return forward(p, b["x"]).sum()


@loss_refused(CaptureError, *IN_PLACE, trainable=False)
def a_write_into_a_frozen_parameter(p: Any, b: Any) -> Tensor:
    p["a"].add_(1)
    return forward(p, b["x"]).sum()


@loss_refused(CaptureError, "batch['x']", HERE, "clone")
def a_write_into_the_batch(p: Any, b: Any) -> Tensor:
    b["x"].add_(1)
    return forward(p, b["x"]).sum()


@loss_refused(CaptureError, "params['b']", HERE, "clone", trainable=False)
def running_statistics_that_are_parameters(p: Any, b: Any) -> Tensor:
    return F.batch_norm(b["x"] @ p["a"], p["b"], p["b"].square(), training=True).sum()


@loss_refused(CaptureError, "into a parameter", HERE, "clone", capture="dynamic")
def a_write_into_a_parameter_on_the_dynamic_rung(p: Any, b: Any) -> Tensor:
    p["a"].mul_(2)
    return forward(p, b["x"]).sum()


@loss_refused(CaptureError, "params['a']", "clone", capture="dynamic")
def a_write_without_gradient_on_the_dynamic_rung(p: Any, b: Any) -> Tensor:
    with torch.no_grad():
        p["a"].mul_(2)
    return forward(p, b["x"]).sum()


@loss_refused(CaptureError, "batch['x']", "clone", capture="dynamic")
def a_write_into_the_batch_on_the_dynamic_rung(p: Any, b: Any) -> Tensor:
    b["x"].add_(1)
    return forward(p, b["x"]).sum()


# What a loss calls.


def _calls_a_step(mesh: zfunc.Mesh, state: zfunc.State, capture: str) -> None:
    inner = zfunc.shard(lambda p, b: forward(p, b["x"]).sum(), mesh)

    def loss(p: Any, b: Any) -> Tensor:
        return forward(p, b["x"]).sum() * inner.value_and_grad(state.params, b)[0]

    zfunc.shard(loss, mesh, capture=capture)(state, rows(mesh.rank, 0))


INSIDE = ("value_and_grad inside of a function", "outside")


@refused(CaptureError, *INSIDE)
def a_step_inside_of_a_loss(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    _calls_a_step(mesh, state, "auto")


@refused(CaptureError, *INSIDE)
def a_step_inside_of_a_loss_on_the_dynamic_rung(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    _calls_a_step(mesh, state, "dynamic")


# What a loss depends on besides its arguments.

OUTSIDE = ints(3, 4)
MODULE = nn.Linear(4, 4).double()


@loss_refused(CaptureError, "not an argument", HERE, "pass it in the batch")
def a_tensor_from_outside(p: Any, b: Any) -> Tensor:
    return (forward(p, b["x"]) * OUTSIDE).sum()


@loss_refused(CaptureError, "not an argument", HERE, "pass it in the batch")
def a_module_from_outside(p: Any, b: Any) -> Tensor:
    return MODULE(forward(p, b["x"])).sum()


def _stateful(calls: list[int]) -> Callable[..., Tensor]:
    def loss(p: Any, b: Any) -> Tensor:
        calls.append(len(calls))
        return forward(p, b["x"]).sum() * len(calls)

    return loss


@refused(CaptureError, "another graph", "Python state", "pass that state in the batch")
def a_counter_in_python(mesh: zfunc.Mesh, state: zfunc.State) -> None:
    step = zfunc.shard(_stateful([]), mesh, capture=zfunc.Capture("traced", check_every=1))
    for _ in range(2):
        step.value_and_grad(state.params, rows(mesh.rank, 0))


@loss_refused(CaptureError, "random's generator", HERE, "key")
def random_numbers_of_python(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).sum() * random.random()


@loss_refused(CaptureError, "numpy's generator", HERE, "key")
def random_numbers_of_numpy(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).sum() * float(numpy.random.rand())


@loss_refused(CaptureError, "torch's generator", HERE, "key")
def a_seed_set_in_the_loss(p: Any, b: Any) -> Tensor:
    torch.manual_seed(3)
    return nn.functional.dropout(forward(p, b["x"])).sum()


@loss_refused(CaptureError, "a torch.Generator", HERE, "key", capture="traced")
def a_generator_made_in_the_loss_when_it_must_be_traced(p: Any, b: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (forward(p, b["x"]) * torch.rand(4, generator=generator)).sum()


@loss_refused(CaptureError, "tensor's value", HERE, "torch.where", capture="traced")
def a_branch_on_a_value_when_it_must_be_traced(p: Any, b: Any) -> Tensor:
    h = forward(p, b["x"])
    return h.sum() if h.max() > 0 else -h.sum()


@loss_refused(CaptureError, "sparse", "leave out sparse=True", capture="traced")
def sparse_gradients_when_it_must_be_traced(p: Any, b: Any) -> Tensor:
    return nn.functional.embedding(b["index"], p["a"], sparse=True).sum()


@loss_refused(CaptureError, "a seed", HERE, "zfunc.remat", capture="traced")
def dropout_under_torch_checkpoint_when_it_must_be_traced(p: Any, b: Any) -> Tensor:
    def block(x: Tensor) -> Tensor:
        return nn.functional.dropout(x @ p["a"])

    return checkpoint(block, b["x"], use_reentrant=False).sum()  # pyright: ignore


@loss_refused(RuntimeError, "use_reentrant=False")
def a_reentrant_checkpoint(p: Any, b: Any) -> Tensor:
    return checkpoint(lambda x, w: x @ w, b["x"], p["a"], use_reentrant=True).sum()  # pyright: ignore


def _modules_refused(loss: Callable[..., Any], *texts: str, **options: Any) -> Refusal:
    """A refusal of a loss that has weights of its own."""

    def attempt(mesh: zfunc.Mesh, state: zfunc.State) -> None:
        del state
        step = zfunc.shard(loss, mesh, **options)
        own = step.init(autograd.weights(0), optim.sgd(RATE))
        step(own, rows(mesh.rank, 0))

    return Refusal(attempt, CaptureError, ("functional_call", "zfunc.remat", *texts))


META, OWN = autograd.checkpointed_template, autograd.checkpointed_module
a_module_that_checkpoints_its_blocks = _modules_refused(META, "not an argument")
a_module_with_weights_that_checkpoints = _modules_refused(OWN, "not an argument")
a_module_that_checkpoints_dynamic = _modules_refused(META, "own weights", capture="dynamic")
a_module_with_weights_that_checkpoints_dynamic = _modules_refused(
    OWN, "own weights", capture="dynamic"
)

_LIBRARY = torch.library.Library("hostile", "DEF")
_LIBRARY.define("shapeless(Tensor x) -> Tensor")
_LIBRARY.impl("shapeless", lambda x: x * 2, "CPU")


@loss_refused(CaptureError, "hostile.shapeless", HERE, "register_fake", capture="traced")
def an_operator_without_shapes(p: Any, b: Any) -> Tensor:
    return torch.ops.hostile.shapeless(forward(p, b["x"])).sum()


@loss_refused(CaptureError, "gather", "dynamic rung", capture="dynamic")
def a_collective_on_the_dynamic_rung(p: Any, b: Any) -> Tensor:
    return zfunc.gather(p["a"]).sum()
