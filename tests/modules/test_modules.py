"""Modules as functions: own structure, buffers that come back, weights from elsewhere."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zfunc
from tests.harness import assert_equal, gathered, ranks
from zfunc import optim
from zfunc.modules import module

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Block(nn.Module):
    """Checkpoints itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class Referring(nn.Module):
    """Reaches one layer as a child, in a plain list, in a dict, and by a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.again = [self.layer]
        self.table = {"layer": self.layer}
        self.call = self.layer.forward
        self.scale = torch.nn.Parameter(torch.tensor(2.0).double())
        self.none = None
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.table["layer"](self.again[0](self.layer(x)))) * self.scale


def linear() -> nn.Module:
    return nn.Linear(4, 4, dtype=torch.float64)


def tied() -> nn.Module:
    net = nn.Sequential(linear(), nn.Tanh(), linear())
    net[2].weight = net[0].weight
    return net


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(linear())


def hooked() -> nn.Module:
    net = nn.Sequential(linear())
    net[0].register_forward_hook(lambda layer, args, out: out * layer.weight.sum())
    return net


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


NETS = {
    "sequence": lambda: nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(4, dtype=torch.float64)),
    "tied": tied,
    "referring": Referring,
    "checkpointed": lambda: nn.Sequential(Block(), Block()),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "spectral norm, fixed": lambda: parametrizations.spectral_norm(linear()).eval(),
    "old weight norm": old_weight_norm,
    "hooked": hooked,
    "batch norm, fixed": lambda: nn.BatchNorm1d(4, dtype=torch.float64).eval(),
    "recurrent": Recurrent,
    "attention": lambda: nn.TransformerEncoderLayer(
        4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name]()


@pytest.mark.parametrize("name", NETS)
def test_loss_and_gradients_are_those_of_the_module(name: str) -> None:
    net = made(name)
    before = {n: x.detach().clone() for n, x in net.state_dict().items()}
    apply_fn, params = module(net)

    def run(mesh: Any) -> Any:
        step = zfunc.shard(
            lambda p, x: apply_fn(p, x).square().mean(), mesh, trainable=apply_fn.trainable
        )
        state = step.init(params, optim.sgd(0.5))
        loss, grads = step.value_and_grad(state.params, X[2 * mesh.rank :][:2])
        state, _ = step(state, X[2 * mesh.rank :][:2])
        return float(loss), zfunc.gather(grads)["params"], zfunc.gather(state.params)["params"]

    results = ranks(3, run)
    assert all(torch.equal(x, before[n]) for n, x in net.state_dict().items())
    loss = sum(net(part).square().mean() for part in X.split(2)) / 3
    names, leaves = zip(*net.named_parameters(), strict=True)
    grads = dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))
    for got, own, after in results:
        assert got == pytest.approx(loss.item(), rel=1e-12)
        for n, leaf in zip(names, leaves, strict=True):
            assert_equal([own[n], after[n]], [grads[n], leaf.detach() - 0.5 * grads[n]], 1e-12)


def test_other_weights_than_the_modules_own() -> None:
    """In eager calls as well: nothing of the module is read but its structure."""
    net, other = made("checkpointed"), made("checkpointed")
    for p in other.parameters():
        nn.init.normal_(p)
    apply_fn, _ = module(net)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
    out = apply_fn({"params": leaves, "buffers": {}}, X)
    grads = torch.autograd.grad(out.sum(), list(leaves.values()))
    wanted = torch.autograd.grad(other(X).sum(), list(other.parameters()))
    assert torch.equal(out, other(X))
    assert_equal(list(grads), list(wanted))


def test_the_function_does_not_keep_the_weights_alive() -> None:
    apply_fn, params = module(nn.Linear(100, 100))
    assert all(p.is_meta for p in apply_fn.structure.parameters())
    storages = {x.untyped_storage().data_ptr() for x in params["params"].values()}
    del params
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and not x.is_meta]
    assert not storages & {x.untyped_storage().data_ptr() for x in alive if x.numel() >= 100}


class Net(nn.Module):
    """Batch norm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.norm = nn.BatchNorm1d(4, momentum=0.25, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).relu()


@pytest.mark.parametrize("capture", ["traced", "dynamic"])
def test_batch_norm_statistics_come_back(capture: str) -> None:
    torch.manual_seed(0)
    net = Net()
    apply_fn, params = module(net)

    def loss_fn(p: Any, x: Tensor) -> Any:
        out, buffers = apply_fn.with_buffers(p, x)
        return out.square().mean(), buffers

    def run(mesh: Any) -> Any:
        step = zfunc.shard(
            loss_fn, mesh, has_aux=True, trainable=apply_fn.trainable, capture=capture
        )
        state = step.init(params, optim.sgd(0.5))
        for _ in range(2):
            state, metrics = step(state, X[3 * mesh.rank :][:3])
            state = apply_fn.updated(state, metrics["aux"])
        after = zfunc.gather(state.params)
        evaluate = zfunc.infer(apply_fn.eval(), mesh)
        return after, evaluate(state.params, X)

    results = ranks(2, run)
    nets = [Net(), Net()]
    for own in nets:
        own.load_state_dict(net.state_dict())
    for _ in range(2):
        losses = [own(x).square().mean() for own, x in zip(nets, X.split(3), strict=True)]
        grads = [
            torch.autograd.grad(loss, list(own.parameters()))
            for loss, own in zip(losses, nets, strict=True)
        ]
        stats = [list(own.buffers()) for own in nets]
        with torch.no_grad():
            for own in nets:
                for p, a, b in zip(own.parameters(), *grads, strict=True):
                    p -= 0.5 * (a + b) / 2
            for a, b in zip(*stats, strict=True):
                mean = (a + b) / 2 if a.is_floating_point() else a
                a.copy_(mean), b.copy_(mean)
    wanted = dict(nets[0].named_buffers()) | dict(nets[0].named_parameters())
    for after, out in results:
        got = after["buffers"] | after["params"]
        assert sorted(got) == sorted(wanted)
        for n, x in got.items():
            assert_equal([x], [wanted[n].detach()], 1e-12)
        assert_equal([out], [nets[0].eval()(X).detach()], 1e-12)
    assert int(net.norm.num_batches_tracked) == 0


class Counting(nn.Module):
    """Writes into a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Assigning(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * self.calls


@pytest.mark.parametrize("make", [Net, Counting, Assigning])
def test_a_write_into_a_buffer_is_refused_or_returned(make: Any) -> None:
    net = make()
    apply_fn, params = module(net)
    with pytest.raises(zfunc.CaptureError, match="with_buffers"):
        apply_fn(params, X)
    if make is Net:
        return
    before = net.calls.clone()
    out, changed = apply_fn.with_buffers(params, X)
    assert torch.equal(out, X * (before + 1)) and torch.equal(changed["calls"], before + 1)
    assert torch.equal(net.calls, before) and torch.equal(params["buffers"]["calls"], before)


def test_modes_are_values() -> None:
    net = nn.Sequential(linear(), nn.Dropout(0.5))
    apply_fn, params = module(net)
    still = apply_fn.eval()
    assert torch.equal(still(params, X), still(params, X))
    assert apply_fn.structure.training and not still.structure.training and net.training
    assert not torch.equal(apply_fn(params, X), apply_fn(params, X))
    assert still.train().structure.training
    net.eval()
    assert apply_fn.structure.training  # what the module becomes later is its own affair


def test_what_does_not_require_gradients_is_frozen() -> None:
    net = nn.Sequential(linear(), linear())
    net[0].requires_grad_(False)
    apply_fn, params = module(net)
    assert apply_fn.trainable["params"] == {
        "0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True,
    }  # fmt: skip
    step = zfunc.shard(
        lambda p, x: apply_fn(p, x).sum(), zfunc.mesh(), trainable=apply_fn.trainable
    )
    _, grads = step.value_and_grad(step.init(params, optim.sgd(0.1)).params, X)
    assert grads["params"]["0.weight"] is None and grads["params"]["1.weight"] is not None


@pytest.mark.parametrize("kind", ["params", "buffers"])
def test_a_wrong_tree_is_named(kind: str) -> None:
    apply_fn, params = module(nn.BatchNorm1d(4))
    name = sorted(params[kind])[0]
    short = {**params, kind: {n: x for n, x in params[kind].items() if n != name}}
    with pytest.raises(zfunc.TreeMismatchError, match=rf"expected\s+'{name}'"):
        apply_fn(short, X)
    with pytest.raises(zfunc.TreeMismatchError, match="no 'other'"):
        apply_fn({**params, kind: {**params[kind], "other": X}}, X)


def test_a_function_that_makes_one_needs_no_memory_for_it() -> None:
    apply_fn, params = module(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval())
    assert all(x.is_meta for x in params["params"].values())
    assert torch.equal(params["buffers"]["1.running_var"], torch.ones(2))
    real = {n: torch.ones(x.shape) for n, x in params["params"].items()}
    out = apply_fn({**params, "params": real}, torch.ones(4, 3))
    assert out.shape == (4, 2) and torch.isfinite(out).all()
    with pytest.raises(zfunc.LayoutError, match="whole"):
        zfunc.shard(lambda p, x: F.mse_loss(apply_fn(p, x), x), zfunc.mesh()).init(
            params, optim.sgd(0.1)
        )
    assert not nn.Linear(2, 2).weight.is_meta  # the hook is gone


def test_unread_leaves_of_all_kinds_keep_their_dtype() -> None:
    net = nn.Linear(4, 4, dtype=torch.bfloat16)
    net.register_buffer("table", torch.arange(3))
    apply_fn, params = module(net)
    step = zfunc.shard(
        lambda p, x: apply_fn(p, x).sum().float(), zfunc.mesh(), trainable=apply_fn.trainable
    )
    state, _ = step(step.init(params, optim.sgd(0.5)), X.bfloat16())
    assert [x.dtype for x in gathered(state.params)] == [
        torch.int64, torch.bfloat16, torch.bfloat16,
    ]  # fmt: skip
    assert pickle.loads(pickle.dumps(apply_fn)).names == apply_fn.names
