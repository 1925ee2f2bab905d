"""Capture: a graph that says what the loss does, or a refusal that says where it would lie."""

from __future__ import annotations

import dataclasses
import random as python_random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import zfunc
from tests.harness import assert_equal
from zfunc import optim, tree
from zfunc.capture import Argument, describe
from zfunc.program.ir import Compute, Program

PARAMS = {"w": torch.arange(9.0).view(3, 3) / 8 - 0.5, "b": torch.ones(3)}
BATCH = torch.arange(6.0).view(2, 3)


class OldStyle(torch.autograd.Function):
    """functorch refuses it: its forward takes a context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def run(loss: Callable[..., Any], *, batch: Any = BATCH, params: Any = None, **options: Any) -> Any:
    """The step, and loss and gradients of one call on a mesh of one."""
    step = zfunc.shard(loss, zfunc.mesh(), capture="traced", **options)
    state = step.init(PARAMS if params is None else params, optim.sgd(0.5))
    value, grads = step.value_and_grad(state.params, batch)
    return step, value, tree.leaves(zfunc.gather(grads))


def eager(loss: Callable[..., Any], *, batch: Any = BATCH, params: Any = None) -> Any:
    """Loss and gradients by plain torch."""
    leaves, structure = tree.flatten(PARAMS if params is None else params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = loss(tree.unflatten(structure, leaves), batch)
    out.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return out.detach(), grads


def captured(loss: Callable[..., Any], **options: Any) -> Program:
    step, *_ = run(loss, **options)
    return step._training.programs.compiled[0].micros[0]


def vjp_loss(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"]).square().mean()


def autograd_loss(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(OldStyle.apply(x @ p["w"]) + p["b"]).square().mean()


def asks_whether_it_is_traced(p: Any, x: Tensor) -> Tensor:
    """As libraries do before they look at a value."""
    h = x @ p["w"]
    if not isinstance(h, FakeTensor) and bool((h == 0).all()):
        return h.sum()
    return (h + p["b"]).square().sum()


@pytest.mark.parametrize(
    ("loss", "derivation"),
    [(vjp_loss, "vjp"), (autograd_loss, "autograd"), (asks_whether_it_is_traced, "autograd")],
    ids=["vjp", "autograd", "asks"],
)
def test_both_derivations_give_the_bits_of_plain_torch(loss: Any, derivation: str) -> None:
    step, value, grads = run(loss)
    assert step.explain().signatures[0].derivation == derivation
    expected, expected_grads = eager(loss)
    assert torch.equal(value, expected)
    assert_equal(grads, expected_grads)


def test_gradients_that_share_memory_are_told_apart() -> None:
    """The gradients of a and b are one expanded number; the update writes into each."""

    def loss(p: Any, x: Tensor) -> Tensor:
        return (p["w"] + p["b"].expand(3, 3)).sum() + p["w"].t().sum()

    program = captured(loss)
    grads = [grad for grad in program.micros[0].grads if grad is not None]
    assert len({program.values[grad].owner for grad in grads}) == len(grads) == 2
    _, grads = eager(loss)
    assert_equal(run(loss)[2], grads)


def test_views_name_the_value_whose_storage_they_use() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        h = x @ p["w"]
        h[0].mul_(2)
        return (h.t()[1:] * p["b"][0]).sum()

    program = captured(loss)
    made: dict[str, Any] = {}
    for op in program.ops:
        if isinstance(op, Compute) and op.phase == "forward":
            made.setdefault(str(op.target)[5:], op.outs[0])
    owner = made["mm.default"]
    for name in ("select.int", "mul_.Tensor", "t.default"):
        assert program.values[made[name]].owner == owner, name
    value, expected = run(loss)[1], eager(loss)[0]
    assert torch.equal(value, expected)


def test_what_nobody_reads_is_dropped_and_what_is_written_is_not() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        _ = torch.linalg.norm(x @ p["w"] @ p["w"])
        h = x * 1
        h.add_(p["b"])
        return h.sum()

    names = [str(op.target)[5:] for op in captured(loss).ops if isinstance(op, Compute)]
    assert not any("norm" in name for name in names)
    assert "add_.Tensor" in names


def test_a_loss_that_ignores_its_parameters() -> None:
    program = captured(lambda p, x: x.sum())
    assert program.micros[0].grads == (None, None)
    _, value, grads = run(lambda p, x: x.sum())
    assert float(value) == 15.0
    assert_equal(grads, [torch.zeros(3), torch.zeros(3, 3)])


def test_aux_does_not_share_memory_with_the_state() -> None:
    def loss(p: Any, x: Tensor) -> Any:
        return x.sum() * p["b"].sum(), [p["w"], p["w"].t(), p["w"][0], x]

    step = zfunc.shard(loss, zfunc.mesh(), has_aux=True)
    state = step.init(PARAMS, optim.sgd(0.5))
    state, metrics = step(state, BATCH)
    for leaf in metrics["aux"]:
        leaf.zero_()
    assert torch.equal(zfunc.gather(state.params)["w"], PARAMS["w"])
    assert float(BATCH.sum()) == 15.0


def test_python_data_becomes_a_constant() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 2.0, 4.0])
        return (p["b"] * weights).sum() * x.sum()

    _, value, grads = run(loss)
    expected, expected_grads = eager(loss)
    assert torch.equal(value, expected)
    assert_equal(grads, expected_grads)


def test_constants_are_not_shared_between_runs() -> None:
    """What a loss writes into its own constants does not stay for the next call."""

    def loss(p: Any, x: Tensor) -> Tensor:
        mask = torch.tensor([1.0, 1.0, 1.0])
        mask[0] += 1
        return (p["b"] * mask * x.sum()).sum()

    step = zfunc.shard(loss, zfunc.mesh())
    state = step.init(PARAMS, optim.sgd(0.5))
    values = [float(step.value_and_grad(state.params, BATCH)[0]) for _ in range(3)]
    assert values == [60.0, 60.0, 60.0]


def writes_parameter(p: Any, x: Tensor) -> Tensor:
    p["w"].mul_(2)
    return (x @ p["w"]).sum()


def writes_batch(p: Any, x: Any) -> Tensor:
    x[0].add_(1)
    return (x @ p["w"]).sum()


OUTSIDE = torch.ones(3)


def uses_outside(p: Any, x: Tensor) -> Tensor:
    return (p["b"] * OUTSIDE).sum()


def asks_value(p: Any, x: Tensor) -> Tensor:
    return p["b"].sum() if x.sum() > 0 else p["w"].sum()


def asks_item(p: Any, x: Tensor) -> Tensor:
    return p["b"].sum() * x.sum().item()


def data_dependent_shape(p: Any, x: Tensor) -> Tensor:
    return x[x > 1].sum() * p["b"].sum()


def moves_numpy(p: Any, x: Tensor) -> Tensor:
    return p["b"].sum() * float(numpy.random.rand())


def moves_python(p: Any, x: Tensor) -> Tensor:
    return p["b"].sum() * python_random.random()


def own_generator(p: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (p["b"] * torch.rand(3, generator=generator)).sum()


def line_of(function: Any, offset: int) -> str:
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno + offset}"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (writes_parameter, r"writes into its argument params\['w'\] in place"),
        (writes_batch, r"writes into its argument in in place|writes into its argument batch"),
        (asks_value, r"depends on a tensor's value"),
        (asks_item, r"depends on a tensor's value|whose shape or content Python needs"),
        (data_dependent_shape, r"depends on a tensor's value|whose shape or content Python needs"),
        (moves_numpy, r"moves numpy's generator from Python"),
        (moves_python, r"moves random's generator from Python"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_would_make_the_graph_lie_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(zfunc.CaptureError, match=message):
        run(loss)


@pytest.mark.parametrize(("loss", "offset"), [(asks_value, 1), (data_dependent_shape, 1)])
def test_a_refusal_names_the_line(loss: Any, offset: int) -> None:
    with pytest.raises(zfunc.CaptureError) as caught:
        run(loss)
    assert line_of(loss, offset) in str(caught.value)


@pytest.mark.parametrize("loss", [uses_outside, own_generator])
def test_what_comes_from_outside_is_right_or_refused(loss: Any) -> None:
    """Either the value of every call, or an error: never that of the trace in silence."""
    try:
        _, value, _ = run(loss)
    except zfunc.CaptureError as refused:
        assert "tensor that is not an argument" in str(refused) or "Generator" in str(refused)
        return
    expected, _ = eager(loss)
    assert torch.equal(value, expected)


@pytest.mark.parametrize("kind", [KeyError, ZeroDivisionError, RuntimeError])
def test_other_exceptions_are_the_users(kind: type[Exception]) -> None:
    error = kind("mine")

    def loss(p: Any, x: Tensor) -> Tensor:
        raise error

    with pytest.raises(kind) as caught:
        run(loss)
    assert caught.value is error


def test_a_seed_that_is_there_already_is_found() -> None:
    """Before and after the loss, and at each draw, the generator is in one and the same state."""

    def loss(p: Any, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        first = torch.rand(3)
        torch.manual_seed(0)
        second = torch.rand(3)
        torch.manual_seed(0)
        return (p["b"] * (first - second)).sum()

    torch.manual_seed(0)
    with pytest.raises(zfunc.CaptureError, match=r"(?s)seed of the function's own .*test_capture"):
        run(loss)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state())


def test_generators_stand_where_they_were() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state(), numpy.random.get_state()[1].tobytes(), python_random.getstate()
    run(lambda p, x: F.dropout(p["b"], 0.5, training=False).sum())
    after = torch.get_rng_state(), numpy.random.get_state()[1].tobytes(), python_random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_python_state_is_checked_on_request() -> None:
    calls = []

    def loss(p: Any, x: Tensor) -> Tensor:
        calls.append(1)
        return p["b"].sum() * len(calls)

    step = zfunc.shard(loss, zfunc.mesh(), capture=zfunc.Capture("traced", check_every=2))
    state = step.init(PARAMS, optim.sgd(0.5))
    step.value_and_grad(state.params, BATCH)
    step.value_and_grad(state.params, BATCH)
    with pytest.raises(zfunc.CaptureError, match="traces to another graph"):
        step.value_and_grad(state.params, BATCH)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch asks for it itself
def test_what_the_compiler_runs_is_called_or_refused() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return torch.compile(torch.relu, backend="eager")(x @ p["w"] + p["b"]).sum()

    with pytest.raises(zfunc.CaptureError, match=r"(?s)compiler.*test_capture.py.*torch.where"):
        run(loss)
    step = zfunc.shard(loss, zfunc.mesh())
    state = step.init(PARAMS, optim.sgd(0.5))
    value, grads = step.value_and_grad(state.params, BATCH)
    right, expected = eager(loss)
    assert_equal([value, *tree.leaves(zfunc.gather(grads))], [right, *expected])
    assert step.explain().signatures[-1].rung == "dynamic"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A static value that compares by one of its fields."""

    value: Any
    note: str = dataclasses.field(compare=False)


def signature(value: Any) -> Argument:
    return describe(value, "batch", torch.device("cpu"))[0]


def test_a_signature_is_equal_exactly_when_a_trace_may_be_reused() -> None:
    x = torch.ones(2, 3)
    same = [
        (x, torch.zeros(2, 3)),
        ({"a": x, "b": 1}, {"b": 1, "a": x + 1}),
        ([x, None, "s"], [x, None, "s"]),
        ({"x": x, "f": float("nan")}, {"x": x, "f": float("nan")}),
        ({"x": x, "f": numpy.float32("nan")}, {"x": x, "f": numpy.float32("nan")}),
        ({"x": x, "f": Setting(1, "a")}, {"x": x, "f": Setting(1, "b")}),
        ({"x": x, "f": frozenset([1, 2])}, {"x": x, "f": frozenset([2, 1])}),
    ]
    other = [
        (x, torch.ones(3, 2)),
        (x, x.double()),
        (x, torch.ones(3, 2).t()),
        ({"a": x, "b": 1}, {"a": x, "b": 1.0}),
        ({"a": x, "b": 1}, {"a": x, "b": True}),
        ({"a": x, "b": 0.0}, {"a": x, "b": -0.0}),
        ({"a": x, "b": 1j}, {"a": x, "b": 1}),
        ({"a": numpy.float32(0)}, {"a": numpy.float32(-0.0)}),
        ({"a": Setting(1, "a")}, {"a": Setting(True, "a")}),
        ({"a": Setting((0.0,), "a")}, {"a": Setting((-0.0,), "a")}),
        ({"a": frozenset([1])}, {"a": frozenset([True])}),
        ({"a": range(0, 3, 2)}, {"a": range(0, 4, 2)}),
        ({"a": x}, {"b": x}),
        ([x], (x,)),
        (x, None),
        ({"f": torch.relu}, {"f": torch.tanh}),
    ]
    for one, two in same:
        assert signature(one) == signature(two)
        assert hash(signature(one)) == hash(signature(two))
    for one, two in other:
        assert signature(one) != signature(two)
