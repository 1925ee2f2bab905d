"""remat as the user calls it: the same function, each call a region while it is captured."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zfunc
from tests.harness import assert_equal, gathered, integers, ranks
from zfunc import optim
from zfunc.rematerialise import name, policies, remat
from zfunc.scope import Scope, entered, scope


class Recorder:
    """Stands for a capture: notes which regions are open."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def annotate(self, region: str) -> Iterator[None]:
        self.open.append(region)
        try:
            yield
        finally:
            self.open.remove(region)

    def note(self) -> None:
        self.seen.append(tuple(self.open))


def affine(x: torch.Tensor, *, scale: float = 2.0, key: Any = None) -> dict[str, torch.Tensor]:
    """Scales."""
    return {"y": x * scale, "x": x}


def test_outside_a_capture_the_function_runs_as_it_is() -> None:
    x = torch.ones(2, requires_grad=True)
    out = remat(affine)(x, scale=3.0)
    assert out.keys() == {"x", "y"}
    assert out["x"] is x
    out["y"].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]


def test_name_documentation_and_signature_stay() -> None:
    wrapped = remat(affine)
    assert (wrapped.__name__, wrapped.__doc__) == ("affine", "Scales.")
    assert inspect.signature(wrapped) == inspect.signature(affine)


def test_callables_without_a_name() -> None:
    class Block:
        """A block with state of its own."""

        def __init__(self) -> None:
            self.factor = 2

        def __call__(self, x: int) -> int:
            return x * self.factor

    wrapped = remat(Block())
    assert wrapped(3) == 6
    assert not hasattr(wrapped, "factor")


def test_every_call_is_a_region_and_calls_nest() -> None:
    recorder = Recorder()

    @remat
    def inner(x: int) -> int:
        recorder.note()
        return x + 1

    @remat
    def outer(x: int) -> int:
        recorder.note()
        return inner(inner(x))

    with entered(Scope({}, recorder.annotate)):
        assert outer(0) == 2
        assert inner(5) == 6
        recorder.note()
    regions = [tuple(tag.removeprefix("remat.") for tag in tags) for tags in recorder.seen]
    assert regions == [("1",), ("1", "2"), ("1", "3"), ("4",), ()]


def test_an_exception_leaves_the_region() -> None:
    recorder = Recorder()

    @remat
    def fails() -> None:
        raise KeyError("w")

    with entered(Scope({}, recorder.annotate)), pytest.raises(KeyError, match="w"):
        fails()
    assert recorder.open == []
    assert scope() is None


def test_scopes_nest() -> None:
    outer, inner = (Scope({}, Recorder().annotate) for _ in range(2))
    with entered(outer):
        with entered(inner) as current:
            assert scope() is current is inner
        assert scope() is outer
    assert scope() is None


def test_policies_are_values() -> None:
    assert policies.nothing == type(policies.nothing)()
    assert policies.names("a", "b") == policies.names("a", "b") != policies.names("b")
    assert policies.budget(3) == policies.budget(3) != policies.budget(4)
    assert remat(affine, policies.nothing)(torch.ones(1))["y"].item() == 2.0


@pytest.mark.parametrize("policy", ["nothing", None, True])
def test_an_unknown_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)unknown policy.*policies\.nothing.*" + repr(policy)):
        remat(affine, policy)


@pytest.mark.parametrize("make", [policies.names, lambda: policies.names("a", 3)])  # pyright: ignore
def test_names_are_strings(make: Any) -> None:
    with pytest.raises(ValueError, match=r"policies\.names"):
        make()


@pytest.mark.parametrize("nbytes", [-1, 0.5, True, None])
def test_a_budget_is_a_number_of_bytes(nbytes: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)policies\.budget.*bytes"):
        policies.budget(nbytes)


def test_a_name_outside_of_a_capture_is_the_tensor_itself() -> None:
    x = torch.ones(2)
    assert name(x, "x") is x
    with pytest.raises(ValueError, match="a string"):
        name(x, 3)  # pyright: ignore


def named_block(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = name(torch.relu(h @ w), "hidden")
    return (hidden * hidden @ w.t()).clamp(-9, 9)


def train_under(mesh: zfunc.Mesh, policy: Any, capture: str) -> list[torch.Tensor]:
    """Leaves after two steps on batches of another length on every rank."""
    generator = torch.Generator().manual_seed(0)
    params = [integers(generator, (4, 6)) for _ in range(3)]

    def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = named_block(x, w) if policy is None else remat(named_block, policy)(x, w)
        return x.square().sum()

    step = zfunc.shard(loss, mesh, capture=capture)
    state = step.init(params, optim.sgd(2.0**-8))
    for number in range(2):
        rows = integers(generator, (3 + 40 * mesh.rank + number, 4))
        state, _ = step(state, rows)
    return gathered(state.params)


POLICIES = [
    policies.nothing,
    policies.matmuls,
    policies.names("hidden"),
    policies.budget(0),
    policies.budget(400),
    policies.budget(10**6),
]


@pytest.mark.parametrize("capture", ["traced", "dynamic"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_ranks_with_batches_of_their_own_train_as_without(policy: Any, capture: str) -> None:
    plain = ranks(2, train_under, None, "traced")
    for got, expected in zip(ranks(2, train_under, policy, capture), plain, strict=True):
        assert_equal(got, expected)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_policy_keeps_nothing_on_the_dynamic_rung(policy: Any) -> None:
    calls: list[bool] = []

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls.append(True)
        return name(torch.relu(x @ w), "hidden").sin()

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return remat(block, policy)(x, w).sum()

    step = zfunc.shard(loss, zfunc.mesh(), capture="dynamic")
    state = step.init(torch.eye(2), optim.sgd(0.5))
    step.value_and_grad(state.params, torch.ones(3, 2))
    assert len(calls) == 2


def test_a_budget_counts_the_result_of_a_collective() -> None:
    start, numel = torch.arange(100.0), 100

    def grads(mesh: zfunc.Mesh, nbytes: int | None) -> Any:
        def block(h: torch.Tensor) -> torch.Tensor:
            pieces = zfunc.scatter(h * 2, mesh, zfunc.Flat(), reduce="sum")
            whole = zfunc.gather(pieces)
            return (whole.sin() * h).sum()

        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (block if nbytes is None else remat(block, policies.budget(nbytes)))(w * x)

        step = zfunc.shard(loss, mesh)
        state = step.init(start, optim.sgd(0.5))
        return gathered(step.value_and_grad(state.params, torch.ones(()) + mesh.rank)[1])

    with pytest.raises(zfunc.BudgetError) as refused:
        ranks(2, grads, 0)
    assert refused.value.needed_bytes == 4 * numel
    assert "collective" in refused.value.op or "gather" in refused.value.op
    for got, plain in zip(
        ranks(2, grads, refused.value.needed_bytes), ranks(2, grads, None), strict=True
    ):
        assert_equal(got, plain)


def test_torch_func_inside_is_refused_on_the_dynamic_rung_alone() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        @remat
        def slope(x: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(lambda y: (w * y).square().sum())(x)

        return slope(x).sum()

    batch = torch.tensor([1.0, 2.0])
    step = zfunc.shard(loss, zfunc.mesh())
    state = step.init(torch.tensor([3.0, -1.0]), optim.sgd(0.125))
    state, metrics = step(state, batch)
    assert metrics["loss"].item() == 2 * 9 * 1 + 2 * 1 * 2
    assert zfunc.gather(state.params).tolist() == [3 - 0.125 * 4 * 3, -1 + 0.125 * 4 * 2]
    step = zfunc.shard(loss, zfunc.mesh(), capture="dynamic")
    with pytest.raises(zfunc.CaptureError, match="inside of a remat"):
        step(state, batch)
