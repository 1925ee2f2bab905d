"""`torch.optim` as oracle: every element after many updates, in float64, fused and unfused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.optim.cutting import clone
from zfunc import optim, schedules, tree

STEPS = 12


def make(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Parameters and a gradient for every update, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 7), "vector": (33,), "number": ()}

    def draw() -> dict[str, Any]:
        return {
            name: torch.randn(shape, generator=generator, dtype=dtype)
            for name, shape in shapes.items()
        }

    return draw(), [draw() for _ in range(STEPS)]


def ours(tx: Any, params: Any, steps: list[Any], *, fused: bool) -> Any:
    """The parameters after all updates, through `apply` or through the bare protocol."""
    params, state, info = clone(params), tx.init(params), optim.LocalInfo()
    for grads in steps:
        if fused:
            params, state, _ = optim.apply(tx, clone(grads), state, params, info)
        else:
            updates, state = tx.update(clone(grads), state, params, info=info)
            params = optim.apply_updates(params, updates)
    return params


def theirs(make_optimizer: Any, params: Any, steps: list[Any], make_scheduler: Any = None) -> Any:
    """The parameters after all updates by a torch optimizer."""
    params = clone(params)
    optimizer = make_optimizer(list(params.values()))
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    for grads in steps:
        for name, param in params.items():
            param.grad = grads[name].clone()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return params


def assert_close(got: Any, expected: Any) -> None:
    """Every element within 1e-12 of its oracle, relative."""
    for name, oracle in expected.items():
        error = (got[name] - oracle.detach()).abs() / oracle.detach().abs()
        assert error.max() <= 1e-12, name


CASES = {
    "sgd": (optim.sgd(0.1), functools.partial(torch.optim.SGD, lr=0.1)),
    "momentum": (
        optim.sgd(0.1, momentum=0.9),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ),
    "nesterov": (
        optim.sgd(0.1, momentum=0.8, nesterov=True),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=True),
    ),
    "sgd with L2": (
        optim.chain(optim.add_decayed_weights(0.2), optim.sgd(0.1, momentum=0.9)),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.2),
    ),
    "adam": (optim.adam(0.01), functools.partial(torch.optim.Adam, lr=0.01)),
    "adam, own rates": (
        optim.adam(0.01, b1=0.8, b2=0.95, eps=1e-3),
        functools.partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.95), eps=1e-3),
    ),
    "adam with L2": (
        optim.chain(optim.add_decayed_weights(0.2), optim.adam(0.01)),
        functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.2),
    ),
    "adagrad": (optim.adagrad(0.1), functools.partial(torch.optim.Adagrad, lr=0.1)),
    "adagrad, own sums": (
        optim.adagrad(0.1, initial_accumulator_value=0.3, eps=1e-2),
        functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3, eps=1e-2),
    ),
    "adagrad, falling": (
        optim.chain(
            optim.add_decayed_weights(0.2), optim.adagrad(lambda count: 0.1 / (1 + 0.25 * count))
        ),
        functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.25, weight_decay=0.2),
    ),
    "adafactor": (
        optim.adafactor(min_dim_size_to_factor=1),
        functools.partial(torch.optim.Adafactor, lr=0.01),
    ),
    "adafactor, own rates": (
        optim.adafactor(0.1, 1, decay_rate=0.5, clipping_threshold=1.25),
        functools.partial(torch.optim.Adafactor, lr=0.1, beta2_decay=-0.5, d=1.25),
    ),
    "adamw": (optim.adamw(0.01), functools.partial(torch.optim.AdamW, lr=0.01)),
    "adamw, own rates": (
        optim.adamw(0.01, b1=0.7, b2=0.9, eps=1e-4, weight_decay=0.3),
        functools.partial(torch.optim.AdamW, lr=0.01, betas=(0.7, 0.9), eps=1e-4, weight_decay=0.3),
    ),
}


@pytest.mark.parametrize("fused", [True, False], ids=["apply", "update"])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_torch(case: str, fused: bool):
    tx, make_optimizer = CASES[case]
    params, steps = make()
    assert_close(ours(tx, params, steps, fused=fused), theirs(make_optimizer, params, steps))


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_muon_agrees_with_torch_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype):
    """Half of small integers: no sum of momentum rounds, so the iteration begins at the same."""
    generator = torch.Generator().manual_seed(0)
    params, *steps = (
        {"w": torch.randint(-8, 9, shape, generator=generator).to(dtype)} for _ in range(4)
    )
    tx = optim.chain(optim.scale_by_muon(beta=0.5), optim.scale_by_learning_rate(0.25))
    options = {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.0}
    expected = theirs(functools.partial(torch.optim.Muon, **options), params, steps)["w"]
    got = ours(tx, params, steps, fused=True)["w"]
    if shape[0] <= shape[1]:
        assert torch.equal(got, expected)
    else:  # the factor of the shape is no power of two: one rounding here, another one there
        eps = torch.finfo(dtype).eps
        assert (got - expected).abs().max() <= len(steps) * eps * expected.abs().max()


def test_muon_adjusts_as_torch():
    params, steps = make()
    params, steps = {"w": params["matrix"]}, [{"w": grads["matrix"]} for grads in steps]
    tx = optim.muon(0.25, weight_decay=0.5, adjust="match_rms_adamw", beta=0.0)
    options = {"lr": 0.25, "weight_decay": 0.5, "momentum": 0.0}
    make_torch = functools.partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw", **options)
    assert_close(ours(tx, params, steps, fused=True), theirs(make_torch, params, steps))


@pytest.mark.parametrize("fused", [True, False], ids=["apply", "update"])
@pytest.mark.parametrize("case", ["momentum", "adam", "adamw", "adagrad, own sums"])
def test_complex_leaves_follow_torch(case: str, fused: bool):
    tx, make_optimizer = CASES[case]
    params, steps = make(torch.complex128)
    assert_close(ours(tx, params, steps, fused=fused), theirs(make_optimizer, params, steps))


def test_lazily_conjugated_gradients():
    params, steps = make(torch.complex128)
    tx, make_optimizer = CASES["adamw"]
    after, state = clone(params), tx.init(params)
    for grads in steps:
        lazy = tree.map(torch.conj, clone(grads))
        assert lazy["matrix"].is_conj()
        after, state, _ = optim.apply(tx, lazy, state, after, optim.LocalInfo())
    conjugated = [tree.map(torch.conj_physical, grads) for grads in steps]
    assert_close(after, theirs(make_optimizer, params, conjugated))


@pytest.mark.parametrize("fused", [True, False], ids=["apply", "update"])
def test_schedules_follow_torch(fused: bool):
    params, steps = make()
    schedule = schedules.linear(0.05, 0.01, 8)

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0, end_factor=0.2, total_iters=8
        )

    for tx, make_optimizer in (
        (optim.sgd(schedule, 0.9), functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
        (optim.adamw(schedule), functools.partial(torch.optim.AdamW, lr=0.05)),
    ):
        expected = theirs(make_optimizer, params, steps, scheduler)
        assert_close(ours(tx, params, steps, fused=fused), expected)


@pytest.mark.parametrize("fused", [True, False], ids=["apply", "update"])
def test_decay_masks_follow_parameter_groups(fused: bool):
    params, steps = make()
    tx = optim.adamw(0.01, weight_decay=0.3, mask=lambda path, shape: len(shape) == 2)

    def make_optimizer(tensors: list[Any]) -> Any:
        matrices = [x for x in tensors if x.dim() == 2]
        others = [x for x in tensors if x.dim() != 2]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)

    expected = theirs(make_optimizer, params, steps)
    assert_close(ours(tx, params, steps, fused=fused), expected)


@pytest.mark.parametrize("fused", [True, False], ids=["apply", "update"])
def test_each_leaf_counts_its_own_updates(fused: bool):
    """A leaf that joins later is corrected for its own age, as a later parameter group is."""
    params, steps = make()
    tx, info = optim.adamw(0.01), optim.LocalInfo()
    frozen = {**params, "vector": None}
    early = ours(tx, frozen, [{**grads, "vector": None} for grads in steps[:4]], fused=fused)
    state = tx.init(frozen)
    for grads in steps[:4]:
        _, state = tx.update(clone({**grads, "vector": None}), state, frozen, info=info)
    fresh = tx.init(params)
    joined = (
        tree.map(
            lambda new, old: new if old is None else old, fresh[0], state[0], none_is_leaf=True
        ),
        *fresh[1:],
    )
    counts = joined[0].count
    assert {name: int(count) for name, count in counts.items()} == {
        "matrix": 4,
        "number": 4,
        "vector": 0,
    }
    current = {**early, "vector": params["vector"].clone()}
    for grads in steps[4:]:
        if fused:
            current, joined, _ = optim.apply(tx, clone(grads), joined, current, info)
        else:
            updates, joined = tx.update(clone(grads), joined, current, info=info)
            current = optim.apply_updates(current, updates)
    oracle = functools.partial(torch.optim.AdamW, lr=0.01)
    old = theirs(oracle, {**params}, steps)
    new = theirs(oracle, {**params}, steps[4:])
    assert_close(current, {**old, "vector": new["vector"]})


def test_low_precision_leaves_keep_their_dtype():
    params, steps = make(torch.bfloat16)
    for tx in (optim.adamw(0.01), optim.sgd(0.1, 0.9), optim.adam(0.01)):
        fused = ours(tx, params, steps, fused=True)
        unfused = ours(tx, params, steps, fused=False)
        assert all(x.dtype == torch.bfloat16 for x in fused.values())
        assert all(torch.equal(fused[name], unfused[name]) for name in params)


def test_wide_gradients_of_narrow_leaves():
    params, steps = make(torch.bfloat16)
    wide = [tree.map(lambda x: x.float(), grads) for grads in steps]
    for tx in (optim.adamw(0.01), optim.sgd(0.1)):
        for fused in (True, False):
            after = ours(tx, params, wide, fused=fused)
            assert all(x.dtype == torch.bfloat16 for x in after.values())
            assert not torch.equal(after["matrix"], params["matrix"])
