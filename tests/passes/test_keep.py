"""What policies keep: the same bits under each of them, and the best choice under a budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.harness import examples
from tests.passes.blocks import BLOCKS, finish, inputs, transformer, weights
from tests.passes.interpreter import capture, check, copies, peak_bytes, recomputed
from zfunc.errors import BudgetError
from zfunc.hardware import Hardware
from zfunc.passes.remat import rematerialise
from zfunc.policy import Policy
from zfunc.program.cost import op_seconds
from zfunc.program.ir import Collective, Compute, Program, reads, writes
from zfunc.rematerialise import name, policies, remat


def kept_bytes(program: Program) -> int:
    """Bytes of storages that forward ops in regions make and later code reads, results aside."""
    ops = [op for op in program.ops if isinstance(op, Compute | Collective)]
    forward = [op for op in ops if getattr(op, "phase", "forward") == "forward"]
    owner = [value.owner for value in program.values]
    home = {owner[out]: op.regions for op in forward for out in writes(op) if owner[out] == out}
    read = {owner[v] for op in ops if op not in forward for v in reads(op)}
    results = {
        owner[v]
        for op in forward
        for v in reads(op)
        if home.get(owner[v]) not in (None, op.regions)
    }
    results.add(owner[program.micros[0].loss or 0])
    return sum(program.values[o].nbytes for o in read - results if home.get(o))


def seconds(program: Program) -> float:
    """What is computed again costs so much."""
    return sum(op_seconds(op, program, Hardware(), {}) for op in recomputed(program))


def blocks_under(policy: Policy, block: Callable[..., Tensor], derivation: str = "vjp") -> Any:
    def loss(params: list[Any], batch: Any) -> Tensor:
        h = batch["x"]
        for p in params:
            h = remat(block, policy)(h, p)
        return finish(h, derivation)

    return loss


POLICIES = [policies.matmuls, policies.budget(1), policies.budget(2000), policies.budget(10**9)]


@pytest.mark.parametrize("derivation", ["vjp", "autograd"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_same_bits(block: Any, policy: Policy, derivation: str) -> None:
    check(blocks_under(policy, block, derivation), weights(2, BLOCKS[block]), inputs())


def test_no_matrix_product_runs_again_under_matmuls() -> None:
    after = check(blocks_under(policies.matmuls, transformer), weights(2, "doqu"), inputs())
    names = {str(op.target) for op in recomputed(after)}
    assert not [n for n in names if "mm" in n or "attention" in n]
    nothing = check(blocks_under(policies.nothing, transformer), weights(2, "doqu"), inputs())
    assert kept_bytes(after) > kept_bytes(nothing)
    assert 0 < seconds(after) < seconds(nothing)


def test_only_what_has_a_name_is_kept() -> None:
    def block(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        hidden = name(torch.tanh(h @ p["o"]), "hidden")
        other = name(torch.sin(hidden) @ p["o"], "other")
        return other.exp() @ p["o"]

    def names_again(policy: Policy) -> set[str]:
        after = check(blocks_under(policy, block), weights(1), inputs())
        return {n for n in copies(after) if n in ("tanh", "sin", "exp")}

    assert names_again(policies.nothing) == {"tanh", "sin", "exp"}
    assert names_again(policies.names("hidden")) == {"sin", "exp"}
    assert names_again(policies.names("other")) == {"tanh", "sin", "exp"}
    assert names_again(policies.names("hidden", "other", "none")) == {"sin", "exp"}


def test_a_name_speaks_of_a_storage_with_its_views_and_writes() -> None:
    def block(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        z = h @ p["o"]
        z.mul_(2)
        name(z[:, 1:], "z")
        F.relu_(z)
        return z.sin() @ p["o"]

    after = check(blocks_under(policies.names("z"), block), weights(1), inputs())
    assert {str(op.target) for op in recomputed(after)} == {"aten.sin.default", "aten.view.default"}


def test_an_inner_policy_speaks_of_what_the_outer_call_computes_again() -> None:
    def middle(outer: Policy, inner: Policy) -> list[int]:
        def body(h: Tensor, p: Mapping[str, Tensor]) -> Tensor:
            return torch.tanh(remat(lambda h: (h @ p["o"]).sin().exp(), inner)(h)) @ p["o"]

        after = check(blocks_under(outer, body), weights(1), inputs())
        return [copies(after)[one] for one in ("mm", "sin", "exp", "tanh")]

    assert middle(policies.nothing, policies.nothing) == [2, 1, 1, 1]
    assert middle(policies.nothing, policies.matmuls) == [1, 1, 1, 1]
    assert middle(policies.matmuls, policies.nothing) == [0, 1, 1, 1]
    assert middle(policies.names("none"), policies.budget(10**9)) == [1, 1, 1, 1]
    assert middle(policies.budget(10**9), policies.nothing) == [0, 0, 0, 0]


def random_loss(plan: Sequence[tuple[str, int, int]], wrap: Callable[..., Any]) -> Any:
    """A region that makes one named value after the other from earlier ones."""

    def loss(params: list[Any], batch: Any) -> Tensor:
        def region(x: Tensor) -> Tensor:
            made = [x]
            for number, (kind, i, j) in enumerate(plan):
                a, b = made[i % len(made)], made[j % len(made)]
                made.append(name(OPS[kind](a, b, params[0]["o"]), str(number)))
            return sum((one.mean() for one in made[1:]), made[-1].sum())

        return wrap(region)(batch["x"] @ params[0]["o"]).square()

    return loss


OPS: dict[str, Callable[..., Tensor]] = {
    "mm": lambda a, b, w: a @ w,
    "mul": lambda a, b, w: a * b,
    "sin": lambda a, b, w: a.sin(),
    "tanh": lambda a, b, w: torch.tanh(a) + b,
    "wide": lambda a, b, w: torch.cat([a, b], -1).exp()[..., : a.shape[-1]] * b,
    "dropout": lambda a, b, w: F.dropout(a, 0.5) * b,
}


@examples(0.1)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 5), st.integers(0, 5)),
        min_size=1,
        max_size=3,
    )
)
def test_a_budget_is_spent_no_worse_than_by_the_best_set_of_names(plan: Any) -> None:
    """Every subset of the values is kept by name, which the choice knows nothing of."""
    params, batch = weights(1), inputs()
    found: list[tuple[int, float]] = []
    for number in range(len(plan) + 1):
        for chosen in itertools.combinations(range(len(plan)), number):
            policy = policies.names("none", *map(str, chosen))
            program = rematerialise(
                capture(random_loss(plan, lambda f, p=policy: remat(f, p)), params, batch)
            )
            found.append((kept_bytes(program), seconds(program)))
    for budget in sorted({nbytes + extra for nbytes, _ in found for extra in (0, -1)} - {-1}):
        loss = random_loss(plan, lambda f, b=budget: remat(f, policies.budget(b)))
        after = check(loss, params, batch)
        assert kept_bytes(after) <= budget
        best = min(cost for nbytes, cost in found if nbytes <= budget)
        assert seconds(after) <= best * (1 + 1e-9) + 1e-12


def test_the_sweep_ends_at_no_recomputation_and_the_peak_follows() -> None:
    params, batch = weights(4, "doqu"), inputs(rows=64)

    def program(policy: Policy | None) -> Program:
        def whole(params: list[Any], batch: Any) -> Tensor:
            h = batch["x"]
            for p in params:
                h = transformer(h, p)
            return finish(h, "vjp")

        return rematerialise(capture(remat(whole, policy) if policy else whole, params, batch))

    plain, most = peak_bytes(program(None)), kept_bytes(program(policies.budget(10**9)))
    limits = [most * part // 32 for part in (0, 2, 8, 31, 32)]
    sweep = [program(policies.budget(limit)) for limit in limits]
    costs = [seconds(one) for one in sweep]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0 < costs[-2]
    assert min(map(peak_bytes, sweep)) < plain / 2
    assert all(kept_bytes(one) <= limit for one, limit in zip(sweep, limits, strict=True))


def test_a_gather_that_only_recomputation_needs_is_dear() -> None:
    """Two values of one size: the one that is slower to compute, or that takes a gather."""

    def loss(params: dict[str, Tensor], batch: Any) -> Tensor:
        def region(x: Tensor) -> Tensor:
            shifted = x + params["w"]  # its derivative does not read the leaf
            doubled = (x * 2).tanh() + x
            return shifted.sin().sum() + doubled.sin().sum()

        h = batch["x"] * params["v"]
        return remat(region, policies.budget(batch["x"].nbytes))(h)

    params, batch = {"v": torch.randn(8), "w": torch.randn(6, 8)}, inputs()
    for network, again in ((1e18, "add"), (1e3, "tanh")):
        hw = Hardware(network_bytes_per_s=network, message_s=0.0)
        after = check(loss, params, batch, hw=hw, axes={"shard": 2})
        made = copies(after)
        assert made["tanh"] == (again == "tanh"), (network, made)
        assert kept_bytes(after) <= batch["x"].nbytes


def test_a_gather_that_the_backward_pass_needs_anyway_is_free() -> None:
    def loss(params: dict[str, Tensor], batch: Any) -> Tensor:
        def region(x: Tensor) -> Tensor:
            product = x * params["w"]  # its derivative reads the leaf
            doubled = (x * 2).tanh() + x
            return product.sin().sum() + doubled.sin().sum()

        h = batch["x"] * params["v"]
        return remat(region, policies.budget(batch["x"].nbytes))(h)

    params, batch = {"v": torch.randn(8), "w": torch.randn(6, 8)}, inputs()
    slow = Hardware(network_bytes_per_s=1e3)
    after = check(loss, params, batch, hw=slow, axes={"shard": 2})
    assert copies(after)["tanh"] == 0 and copies(after)["mul_1"] == 1


def test_what_depends_on_leaves_alone_is_not_kept() -> None:
    def loss(params: list[Any], batch: Any) -> Tensor:
        def region(x: Tensor) -> Tensor:
            w = params[0]["o"].double().sin()
            return ((x.double() @ w).tanh() @ w).sum()

        return remat(region, policies.budget(10**9))(batch["x"])

    after = check(loss, weights(1), inputs())
    again = {str(op.target) for op in recomputed(after)}
    assert "aten.sin.default" in again and "aten.tanh.default" not in again


def overwritten(x: Tensor, w: Tensor) -> Tensor:
    a = x @ w
    b = torch.sin(a * 2)
    return b * torch.cos(a.add_(1))


def test_a_budget_below_what_cannot_be_computed_again_is_refused() -> None:
    def loss_under(nbytes: int) -> Any:
        def loss(params: list[Any], batch: Any) -> Tensor:
            block = remat(lambda x: overwritten(x, params[0]["o"]).sum(), policies.budget(nbytes))
            return block(batch["x"] @ params[0]["o"])

        return loss

    params, batch = weights(1), inputs()
    with pytest.raises(BudgetError, match=r"policies\.budget\(3\) of loss, remat 1") as refused:
        check(loss_under(3), params, batch)
    needed = refused.value.needed_bytes
    assert refused.value.limit_bytes == 3 and refused.value.op
    assert needed > 0 and str(needed) in str(refused.value)
    with pytest.raises(BudgetError):
        check(loss_under(needed - 1), params, batch)
    assert kept_bytes(check(loss_under(needed), params, batch)) == needed
