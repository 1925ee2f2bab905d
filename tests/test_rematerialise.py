"""remat as the user calls it: the same function, each call a region while it is captured."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zfunc
from zfunc import optim
from zfunc.rematerialise import policies, remat
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
    assert remat(affine, policies.nothing)(torch.ones(1))["y"].item() == 2.0


@pytest.mark.parametrize("policy", ["nothing", None, True])
def test_an_unknown_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)unknown policy.*policies\.nothing.*" + repr(policy)):
        remat(affine, policy)


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
