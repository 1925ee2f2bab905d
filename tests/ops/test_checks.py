"""Wrong arguments raise a ValueError that names them, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from zfunc import ops

Arguments = dict[str, Any]


def good() -> Arguments:
    tensors = {name: [torch.ones(4), torch.ones(6)] for name in ("params", "grads", "mu", "nu")}
    rates = {"lr": 0.1, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": [1, 2]}
    return {**tensors, **rates}


def replace(name: str, i: int, value: object) -> Callable[[Arguments], None]:
    def change(a: Arguments) -> None:
        a[name][i] = value

    return change


def share(name: str, i: int, other: str, j: int, begin: int = 0) -> Callable[[Arguments], None]:
    """Makes one tensor a view of memory that another one uses."""

    def change(a: Arguments) -> None:
        memory = torch.ones(16)
        a[other][j] = memory[: a[other][j].numel()]
        a[name][i] = memory[begin : begin + a[name][i].numel()]

    return change


BAD: dict[str, tuple[Callable[[Arguments], object], str]] = {
    "dtype": (
        replace("grads", 1, torch.ones(6).double()),
        "dtype of grads[1]: expected torch.float32, got torch.float64",
    ),
    "no kernel": (
        lambda a: a.update(params=[x.half() for x in a["params"]]),
        "dtype of params[0]: expected torch.float32 or torch.float64, got torch.float16",
    ),
    "size": (replace("mu", 1, torch.ones(7)), "shape of mu[1]: expected (6,), got (7,)"),
    "shape": (
        lambda a: a.update(
            params=[torch.ones(2, 2), torch.ones(6)], grads=[torch.ones(2, 2), torch.ones(6)]
        ),
        "shape of mu[0]: expected (2, 2), got (4,)",
    ),
    "length": (lambda a: a["nu"].pop(), "number of tensors in nu: expected 2, got 1"),
    "strides": (
        replace("nu", 0, torch.ones(8)[::2]),
        "contiguity of nu[0]: expected True, got False",
    ),
    "sparse": (
        replace("grads", 0, torch.ones(4).to_sparse()),
        "layout of grads[0]: expected torch.strided, got torch.sparse_coo",
    ),
    "device": (
        replace("mu", 0, torch.ones(4, device="meta")),
        "device of mu[0]: expected cpu, got meta",
    ),
    "negated": (
        replace("grads", 0, torch.ones(4, dtype=torch.complex64).conj().view(-1).imag),
        "of grads[0]: expected",
    ),
    "no tensor": (replace("params", 1, [1.0]), "params[1]: expected a tensor, got list"),
    "no list": (lambda a: a.update(mu=iter(a["mu"])), "mu: expected a list of tensors"),
    "same tensor twice": (share("mu", 0, "mu", 1), "mu[0] and mu[1] apart, got an overlap"),
    "params in grads": (share("params", 0, "grads", 1, 5), "grads[1] and params[0] apart"),
    "grads in nu": (share("grads", 0, "nu", 0, 3), "nu[0] and grads[0] apart"),
    "params and nu": (share("params", 1, "nu", 0, 3), "nu[0] and params[1] apart"),
    "step": (lambda a: a.update(step=[1, 0]), "step: expected an int of at least 1, got 0"),
    "steps": (lambda a: a.update(step=[1]), "number of values in step: expected 2, got 1"),
    "decays": (
        lambda a: a.update(weight_decay=[0.0] * 3),
        "number of values in weight_decay: expected 2, got 3",
    ),
    "b1": (lambda a: a.update(b1=1.0), "b1: expected a rate in [0, 1), got 1.0"),
    "b2": (lambda a: a.update(b2=-0.1), "b2: expected a rate in [0, 1), got -0.1"),
    "eps": (lambda a: a.update(eps=-1e-8), "eps: expected a value of at least 0"),
    "threads": (lambda a: a.update(threads=0), "threads: expected an int of at least 1, got 0"),
}


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("case", BAD)
def test_adamw_refuses(case: str, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_NATIVE", native)
    change, message = BAD[case]
    arguments = good()
    change(arguments)
    tensors = [x for v in arguments.values() if isinstance(v, list) for x in v]
    readable = [
        x
        for x in tensors
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_meta
    ]
    before = [x.clone() for x in readable]
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.adamw_(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(readable, before, strict=True))


def test_gradients_may_share_memory_and_neighbours_may_touch() -> None:
    memory = torch.arange(40.0)
    pieces = [memory[4 * i : 4 * i + 4] for i in range(6)]
    empty = memory[2:2]
    gradient = torch.ones(4)
    rates = {"lr": 0.1, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    ops.adamw_(
        [pieces[0], pieces[3], empty],
        [gradient, gradient, empty],
        [pieces[1], pieces[4], empty],
        [pieces[2], pieces[5], empty],
        **rates,
    )
    assert torch.equal(memory[24:], torch.arange(24.0, 40.0))
    assert not torch.equal(pieces[0], torch.arange(4.0))


@pytest.mark.parametrize("function", [ops.sum_squares, ops.nonfinite, ops.all_finite])
def test_reductions_refuse(function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="expected a list of tensors, got Tensor"):
        function(torch.ones(3))
    with pytest.raises(ValueError, match=re.escape("tensors[1]: expected a tensor, got float")):
        function([torch.ones(3), 1.0])
    with pytest.raises(ValueError, match=re.escape("layout of tensors[0]")):
        function([torch.ones(3).to_sparse()])
    with pytest.raises(ValueError, match="threads: expected an int of at least 1, got 0"):
        function([torch.ones(3)], threads=0)


def test_sum_squares_wants_one_device() -> None:
    with pytest.raises(ValueError, match="expected one device, got cpu, meta"):
        ops.sum_squares([torch.ones(3), torch.ones(3, device="meta")])
