"""derive: what depends on leaves alone leaves the op list, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from tests.checker import check_stage
from tests.programs import capture
from zfunc import optim
from zfunc.passes.accumulate import accumulate
from zfunc.passes.derive import derive
from zfunc.program.ir import Compute, Program


def derived(loss: Callable[..., Tensor], params: Any = None, batch: Any = None) -> Program:
    """The program after the pass, which the checker has seen."""
    params = {"w": torch.ones(8, 8), "v": torch.ones(8, 8)} if params is None else params
    captured, mesh = capture(loss, params, torch.ones(2, 8) if batch is None else batch)
    before = accumulate([captured], mesh, update=True)
    after = derive(before)
    check_stage(after, "derive", before=before)
    return after


def names(program: Program) -> list[str]:
    """The operators of the forward pass that stay in the op list."""
    computes = [op for op in program.ops if isinstance(op, Compute)]
    return [str(op.target)[5:] for op in computes if op.phase == "forward"]


def recipes(program: Program) -> list[str]:
    """The operators of recipes, each op once."""
    ops = {id(op): op for op in program.derived.values()}
    return [str(op.target)[5:] for op in ops.values()]


def test_casts_transposes_and_stacks_of_leaves_become_recipes() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        both = torch.stack([p["w"], p["v"]]).sum(0)
        return (x @ p["w"].double().float() @ p["v"].t() @ both).sum()

    program = derived(loss)
    made = recipes(program)
    assert {"_to_copy.default", "t.default", "stack.default"} <= set(made)
    assert not {"_to_copy.default", "stack.default"} & set(names(program))
    for value in program.derived:
        owner = program.values[value].owner
        assert program.values[owner].role in ("derived", "leaf")
    assert all(op.phase == "derive" for op in program.derived.values())


def test_equal_recipes_are_one() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return (x @ p["w"].double().float() + x @ p["w"].double().float()).sum()

    assert recipes(derived(loss)).count("_to_copy.default") == 2, "there and back, once each"


def test_views_of_equal_recipes_are_recipes_too() -> None:
    """The second cast is the first one, so its view is one of the first cast's storage."""

    def loss(p: Any, x: Tensor) -> Tensor:
        one, other = p["w"].double().view(-1), p["w"].double().view(4, 16)
        return one.sum() + (other * 2).sum() * x.sum()

    program = derived(loss)
    stay = {value for op in program.ops if isinstance(op, Compute) for value in op.outs}
    for value, op in program.derived.items():
        owner = program.values[value].owner
        assert owner == value or owner in program.derived or program.values[owner].role == "leaf"
        assert value not in stay
        assert op.phase == "derive"


def test_what_reads_the_batch_stays() -> None:
    program = derived(lambda p, x: ((x @ p["w"]) * x.mean() @ p["v"]).sum())
    assert names(program).count("mm.default") >= 2
    assert "mean.default" in names(program)


def test_small_results_stay_and_what_is_made_of_them() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        penalty = sum((leaf * leaf).sum() for leaf in p.values()) * 0.5
        return (x @ p["w"]).sum() + penalty

    program = derived(loss)
    assert names(program).count("sum.default") == 3
    assert "sum.default" not in recipes(program)
    assert "add.Tensor" not in recipes(program)


def test_a_norm_is_kept_and_what_it_scales_is_derived() -> None:
    program = derived(lambda p, x: (x @ (p["w"] / p["w"].norm())).sum())
    assert "div.Tensor" in recipes(program)
    assert any("norm" in name for name in names(program))


def test_a_copy_of_a_leaf_that_is_written_stays() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        w = p["w"].clone()
        w[0] = 0
        return (x @ w).sum()

    program = derived(loss)
    assert "clone.default" in names(program)
    assert "clone.default" not in recipes(program)


def test_outputs_stay() -> None:
    captured, mesh = capture(
        lambda p, x: (p["w"] * 2).sum(), {"w": torch.ones(3, 3)}, torch.ones(1)
    )
    before = accumulate([captured], mesh, update=False)
    after = derive(before)
    made = {value for op in after.ops if isinstance(op, Compute) for value in op.outs}
    (micro,) = after.micros
    assert {micro.loss, *(grad for grad in micro.grads if grad is not None)} <= made


def test_random_numbers_stay() -> None:
    program = derived(
        lambda p, x: (torch.bernoulli(torch.sigmoid(p["w"])) * p["w"]).sum() * x.sum()
    )
    assert any(name.startswith("bernoulli") for name in names(program))
    assert not any(name.startswith("bernoulli") for name in recipes(program))


def test_a_recipe_makes_its_python_values_again() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(8, 8))
        return (x @ (p["w"] * mask)).sum() + (mask * x.sum()).sum()

    program = derived(loss)
    assert "tril.default" in recipes(program)
    assert "tril.default" in names(program), "the op that computes with it has its own"


@pytest.mark.parametrize("kind", ["weights", "numbers", "python"])
def test_chains_of_any_length(kind: str) -> None:
    length = 1200

    def loss(p: Any, x: Tensor) -> Tensor:
        if kind == "weights":
            total = p["w"][0]
            for _ in range(length):
                total = total + p["w"][1]
        elif kind == "numbers":
            total = p["w"][0].sum()
            for _ in range(length):
                total = total + p["w"][1].sum()
        else:
            table = torch.zeros(8)
            for number in range(length):
                table = table + number
            total = p["w"] * table
        return (total * x.sum()).sum()

    mesh = zfunc.abstract_mesh({"shard": 2})
    step = zfunc.shard(loss, mesh, trainable=False)
    state = step.abstract({"w": torch.ones(2, 8)}, optim.sgd(0.1))
    program = step.lower(state, torch.ones(3)).program
    assert len(program.ops) > length


def test_a_cast_model_is_never_alive_as_a_whole() -> None:
    """A user's `.double()` of every layer would keep a second model alive through backward."""

    def loss(params: Any, x: Tensor) -> Tensor:
        for w in params:
            x = torch.tanh(x @ w.double())
        return x.sum()

    layers = [torch.ones(128, 128) for _ in range(8)]
    one = layers[0].nbytes
    mesh = zfunc.abstract_mesh({"shard": 2})
    step = zfunc.shard(loss, mesh, prefetch=zfunc.Prefetch(live_bytes=0))
    state = step.abstract(layers, optim.sgd(0.1))
    batch = torch.ones(2, 128).double()
    with pytest.raises(zfunc.BudgetError) as refused:
        step.lower(state, batch)
    # A leaf, its cast, and the gradients of both with what the reduce of the bucket receives.
    tight = zfunc.Prefetch(live_bytes=refused.value.needed_bytes)
    step = zfunc.shard(loss, mesh, prefetch=tight)
    memory = step.lower(state, batch).memory_analysis()
    assert memory.peak_live_bytes <= tight.live_bytes
    assert memory.peak_activation_bytes < 8 * 2 * one
