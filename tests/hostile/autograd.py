"""Losses that differentiate inside, checkpoint, or bring derivatives of their own."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zfunc
from tests.hostile.case import case, ints
from tests.hostile.trees import forward, mlp, rows

AUTOGRAD = "traced autograd"


class Cube(torch.autograd.Function):
    """New style: `setup_context` apart from `forward`; twice the derivative, to be told apart."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        return 6 * x**2 * grad


class OldCube(torch.autograd.Function):
    """Old style: `forward(ctx, ...)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        return 6 * x**2 * grad


class FirstRow(torch.autograd.Function):
    """Its derivative writes the gradient into zeros that it has made."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x[0].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        whole = grad.new_zeros(ctx.shape)
        whole[0] = grad
        return whole


# torch warns of code of its own when it loads its rules for forward mode.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.func.jvp(torch.sin, (torch.ones(1),), (torch.ones(1),))
    importlib.import_module("torch._decomp.decompositions_for_jvp")


@case(mlp, rows)
def a_function_of_the_new_style(p: Any, b: Any) -> Tensor:
    return Cube.apply(forward(p, b["x"]).clamp(-2, 2)).sum()  # pyright: ignore


@case(mlp, rows)
def a_derivative_written_into_zeros(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum() + FirstRow.apply(p["a"]).sum()  # pyright: ignore


@case(mlp, rows)
def a_derivative_that_is_nothing_but_written_zeros(p: Any, b: Any) -> Tensor:
    return FirstRow.apply(p["a"]).sum() * b["x"].sum()  # pyright: ignore


@case(mlp, rows, rung=AUTOGRAD)
def a_function_of_the_old_style(p: Any, b: Any) -> Tensor:
    return OldCube.apply(forward(p, b["x"]).clamp(-2, 2)).sum()  # pyright: ignore


@case(mlp, rows, rung=AUTOGRAD)
def checkpoint_in_the_loss(p: Any, b: Any) -> Tensor:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w + p["b"])

    h = checkpoint(block, b["x"], p["a"], use_reentrant=False)
    return (h @ p["c"]).square().sum()


@case(mlp, rows, rung=AUTOGRAD)
def nested_checkpoints(p: Any, b: Any) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.relu(x @ p["a"] + p["b"])

    def outer(x: Tensor) -> Tensor:
        h = checkpoint(inner, x, use_reentrant=False)
        return torch.relu(h @ p["c"]).clamp(max=3)

    return checkpoint(outer, b["x"], use_reentrant=False).square().sum()


@case(mlp, rows)
def remat_of_blocks_in_blocks(p: Any, b: Any) -> Tensor:
    inner = zfunc.remat(lambda x: torch.relu(x @ p["a"] + p["b"]))
    outer = zfunc.remat(lambda x: torch.relu(inner(x) @ p["c"]).clamp(max=3))
    return outer(outer(b["x"])).square().sum()


@case(mlp, rows, options={"remat": zfunc.policies.nothing})
def remat_of_the_whole_loss(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()


@case(mlp, rows, rung="dynamic autograd", options={"remat": zfunc.policies.nothing})
def remat_in_remat_on_the_dynamic_rung(p: Any, b: Any) -> Tensor:
    block = zfunc.remat(lambda x: torch.relu(x @ p["a"] + p["b"]) * 2)
    h = block(b["x"]) @ p["c"]
    return (h if float(h.detach().sum()) > 0 else -h).square().sum()


def _vector_loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).pow(3).sum()


@case(lambda rank: ints(1, 4, 3), rows)
def vmap_of_grad(p: Any, b: Any) -> Tensor:
    each = torch.func.vmap(torch.func.grad(_vector_loss), in_dims=(None, 0))(p, b["x"])
    return each.clamp(-4, 4).square().sum() + b["x"].sum()


@case(lambda rank: ints(1, 4, 3), rows)
def jvp_of_grad(p: Any, b: Any) -> Tensor:
    grad = torch.func.grad(lambda w: _vector_loss(w, b["x"]))
    out, tangent = torch.func.jvp(grad, (p,), (torch.ones_like(p),))
    return (out * tangent).sum()


@case(lambda rank: ints(1, 4, 3), rows)
def jacobians(p: Any, b: Any) -> Tensor:
    def f(w: Tensor) -> Tensor:
        return (b["x"][:2] @ w).square()

    return torch.func.jacrev(f)(p).sum() + torch.func.jacfwd(f)(p).square().sum()  # pyright: ignore


@case(lambda rank: ints(1, 4, 3), rows)
def a_hessian_vector_product(p: Any, b: Any) -> Tensor:
    def f(w: Tensor) -> Tensor:
        return _vector_loss(w, b["x"])

    product = torch.func.vjp(torch.func.grad(f), p)[1](torch.ones_like(p))[0]
    return product.square().sum()


@case(lambda rank: ints(1, 4, 3), rows, rung=AUTOGRAD)
def a_gradient_penalty_by_autograd_grad(p: Any, b: Any) -> Tensor:
    x = b["x"].detach().requires_grad_()
    (grad,) = torch.autograd.grad(_vector_loss(p, x), x, create_graph=True)
    return grad.square().sum()


@case(mlp, rows)
def inner_steps_by_func_grad(p: Any, b: Any) -> Tensor:
    """MAML (Finn et al. 2017): the loss after two inner steps of gradient descent."""

    def inner(q: Any) -> Tensor:
        return forward(q, b["x"]).square().sum()

    for _ in range(2):
        grads = torch.func.grad(inner)(p)
        p = {k: p[k] - 2.0**-10 * grads[k] for k in p}
    return inner(p)


@case(mlp, rows)
def inner_steps_by_autograd_grad(p: Any, b: Any) -> Tensor:
    loss = forward(p, b["x"]).square().sum()
    grads = torch.autograd.grad(loss, list(p.values()), create_graph=True)
    q = {k: w - 2.0**-10 * g for (k, w), g in zip(p.items(), grads, strict=True)}
    return forward(q, b["x"]).square().sum()


@case(mlp, rows, rung=AUTOGRAD)
def first_order_inner_steps(p: Any, b: Any) -> Tensor:
    q = {k: w.detach().requires_grad_() for k, w in p.items()}
    loss = forward(q, b["x"]).square().sum()
    grads = torch.autograd.grad(loss, list(q.values()))
    return forward({k: p[k] - g for k, g in zip(p, grads, strict=True)}, b["x"]).sum()


@case(mlp, rows)
def parts_without_gradient(p: Any, b: Any) -> Tensor:
    with torch.no_grad():
        target = forward(p, b["x"]) + 1
    return (forward(p, b["x"]) - target * p["b"].detach().sum()).square().sum()


@case(mlp, rows)
def a_hook_on_an_activation(p: Any, b: Any) -> Tensor:
    h = torch.relu(b["x"] @ p["a"] + p["b"])
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 2)
    return (h @ p["c"]).square().sum()


def _embedded(p: Any, b: Any, *, sparse: bool = False) -> Tensor:
    return (F.embedding(b["index"], p["embed"], sparse=sparse) @ p["w"]).square().sum()


def _table(rank: int) -> Any:
    return {"embed": ints(1, 6, 3), "w": ints(2, 3, 2)}


@case(_table, rows, dense=_embedded, rung="dynamic autograd")
def sparse_embedding_gradients(p: Any, b: Any) -> Tensor:
    return _embedded(p, b, sparse=True)


class Block(nn.Module):
    """A block that checkpoints itself."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width).double()

    def body(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)).clamp(max=4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class Plain(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _modules(kind: type[Block]) -> nn.Module:
    return nn.Sequential(*(kind(4) for _ in range(2)))


def weights(rank: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = _modules(Plain).state_dict()
    return {k: ints(n, *v.shape) for n, (k, v) in enumerate(made.items())}


def _module_loss(module: nn.Module, p: Any, b: Any) -> Tensor:
    return torch.func.functional_call(module, p, b["x"], strict=True).square().sum()


def _dense(p: Any, b: Any) -> Tensor:
    return _module_loss(_modules(Plain), p, b)


def _meta(kind: type[Block]) -> nn.Module:
    with torch.device("meta"):
        return _modules(kind)


# Templates whose own weights must not count: on no device, or with random values.
PLAIN, META, OWN = _meta(Plain), _meta(Block), _modules(Block)


@case(weights, rows, dense=_dense)
def a_module_under_functional_call(p: Any, b: Any) -> Tensor:
    return _module_loss(PLAIN, p, b)


def checkpointed_template(p: Any, b: Any) -> Tensor:
    """Not a case: plain torch recomputes with other weights, silently; see `refusals`."""
    return _module_loss(META, p, b)


def checkpointed_module(p: Any, b: Any) -> Tensor:
    return _module_loss(OWN, p, b)


class Rematerialised(Block):
    def forward(self, x: Tensor) -> Tensor:
        return zfunc.remat(self.body)(x)


REMAT = _meta(Rematerialised)


@case(weights, rows, dense=_dense)
def a_module_that_rematerialises_its_blocks(p: Any, b: Any) -> Tensor:
    return _module_loss(REMAT, p, b)
