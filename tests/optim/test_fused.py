"""The rewrite to the AdamW kernel: what it matches, and that it means the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optim.cutting import clone
from zfunc import ops, optim, schedules, tree
from zfunc.errors import TreeMismatchError
from zfunc.optim import fused

ADAMW = optim.adamw(0.01, weight_decay=0.3)


@pytest.mark.parametrize(
    ("tx", "matches"),
    [
        (ADAMW, True),
        (optim.adam(0.01), True),
        (optim.adamw(schedules.constant(0.1), weight_decay=schedules.constant(0.1)), True),
        (optim.chain(optim.clip_by_global_norm(1.0), ADAMW), True),
        (optim.chain(ADAMW, optim.clip_by_global_norm(1.0)), False),
        (optim.chain(optim.scale(2.0), ADAMW), False),
        (optim.chain(optim.add_decayed_weights(0.1), optim.adam(0.1)), False),
        (optim.chain(optim.clip_by_global_norm(1.0), optim.clip_by_global_norm(1.0), ADAMW), False),
        (optim.chain(optim.scale_by_adam(), optim.scale(-0.1)), False),
        (optim.sgd(0.1), False),
        (optim.clip_by_global_norm(1.0), False),
        (optim.identity(), False),
    ],
)
def test_matches(tx: Any, matches: bool):
    assert (fused.match(tx) is not None) == matches


def draw(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """Leaves of several sizes, one of them transposed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (40, 9), "b": (33,), "c": (), "empty": (0, 3)}
    leaves = {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in shapes.items()}
    return {**leaves, "turned": torch.randn(7, 5, generator=generator, dtype=dtype).T}


def both(tx: Any, params: Any, grads: Any, state: Any) -> Any:
    """The result of one update from the same start, fused and by the chain."""
    info = optim.LocalInfo()
    new, fused_state, _ = optim.apply(tx, clone(grads), clone(state), clone(params), info)
    updates, chain_state = tx.update(clone(grads), clone(state), params, info=info)
    return (new, fused_state), (optim.apply_updates(params, updates), chain_state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("mask", [None, lambda path, shape: len(shape) == 1])
def test_fused_agrees_within_the_stated_bound(dtype: torch.dtype, max_norm: Any, mask: Any):
    lr, decay, unit = 0.01, 0.3, {torch.float32: 2.0**-24, torch.float64: 2.0**-53}[dtype]
    tx = optim.adamw(lr, weight_decay=decay, mask=mask)
    if max_norm:
        tx = optim.chain(optim.clip_by_global_norm(max_norm), tx)
    params = draw(0, dtype)
    state = tx.init(params)
    for seed in range(1, 6):
        (new, fused_state), (expected, chain_state) = both(tx, params, draw(seed, dtype), state)
        assert all(
            torch.equal(x, y)
            for x, y in zip(tree.leaves(fused_state), tree.leaves(chain_state), strict=True)
        )
        for name, p in params.items():
            mu, nu, count = (
                getattr(chain_state[-3], field)[name].double() for field in ("mu", "nu", "count")
            )
            t = float(count)
            u = (mu / (1 - 0.9**t)).abs() / ((nu / (1 - 0.999**t)).sqrt() + 1e-8)
            size = 2 * expected[name].abs() + 20 * lr * (u + decay * p.abs())
            assert ((new[name] - expected[name]).abs() <= size.double() * unit).all(), name
        params, state = expected, chain_state


def test_the_kernel_runs(monkeypatch: pytest.MonkeyPatch):
    """Contiguous float32 and float64 leaves go to the kernel, from within a partition too."""
    taken: list[int] = []

    def spy(params: Any, *args: Any, **kwargs: Any) -> None:
        taken.extend(x.numel() for x in params)

    monkeypatch.setattr(ops, "adamw_", spy)
    params = {
        "a": torch.zeros(1),
        "b": torch.zeros(2, dtype=torch.float64),
        "c": torch.zeros(3, dtype=torch.bfloat16),
        "d": torch.zeros(2, 2).T[:1],
        "e": torch.zeros(5),
        "f": torch.zeros(6),
    }
    labels = {name: "sgd" if name == "f" else "adam" for name in params}
    tx = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.partition({"adam": ADAMW, "sgd": optim.sgd(0.1)}, labels),
    )
    grads = tree.map(torch.ones_like, params)
    optim.apply(tx, grads, tx.init(params), params, optim.LocalInfo())
    assert sorted(taken) == [1, 2, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_takes_a_tree_of_one_dtype_in_one_call(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    calls: list[int] = []
    monkeypatch.setattr(ops, "adamw_", lambda params, *args, **kwargs: calls.append(len(params)))
    params = {"a": torch.zeros(3, dtype=dtype), "b": [torch.zeros(0, dtype=dtype)]}
    grads = tree.map(torch.ones_like, params)
    optim.apply(ADAMW, grads, ADAMW.init(params), params, optim.LocalInfo())
    assert calls == [2]


@pytest.mark.parametrize("head", [[], [optim.clip_by_global_norm(0.5)]])
def test_parts_of_a_partition_agree_with_the_chain(head: list[Any]):
    tx = optim.chain(
        *head,
        optim.partition(
            {"on": ADAMW, "off": optim.sgd(0.1, 0.9)},
            lambda path, shape: "on" if len(shape) == 2 else "off",
        ),
    )
    params = draw(0, torch.float64)
    state = tx.init(params)
    for seed in range(1, 4):
        (new, fused_state), (expected, chain_state) = both(
            tx, params, draw(seed, torch.float64), state
        )
        assert tree.structure(fused_state) == tree.structure(chain_state)
        pairs = zip(tree.leaves(fused_state), tree.leaves(chain_state), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)
        for name in params:
            torch.testing.assert_close(new[name], expected[name], rtol=1e-14, atol=1e-15)
        params, state = expected, chain_state


@pytest.mark.parametrize("tx", [ADAMW, optim.sgd(0.1, 0.9), optim.identity(), optim.scale(2.0)])
def test_update_never_writes_params_and_apply_writes_them_in_place(tx: Any):
    params, grads = draw(0, torch.float32), draw(1, torch.float32)
    before, info = clone(params), optim.LocalInfo()
    tx.update(clone(grads), tx.init(params), params, info=info)
    assert all(torch.equal(params[name], before[name]) for name in params)
    new, _, _ = optim.apply(tx, grads, tx.init(params), params, info)
    assert all(new[name] is params[name] for name in params)
    assert not torch.equal(params["a"], before["a"])


def test_leaves_that_require_grad_are_updated_without_a_graph():
    params = {"a": torch.ones(3, requires_grad=True)}
    for tx in (ADAMW, optim.sgd(0.1, 0.9)):
        state = tx.init(params)
        grads = {"a": torch.ones(3, requires_grad=True) * 2}
        new, state, _ = optim.apply(tx, grads, state, params, optim.LocalInfo())
        assert new["a"].grad_fn is None
        assert not any(x.requires_grad for x in tree.leaves(state))


def test_results_do_not_depend_on_threads():
    params, grads = draw(0, torch.float32), draw(1, torch.float32)
    tx = optim.chain(optim.clip_by_global_norm(0.5), ADAMW)
    results = [
        optim.apply(
            tx,
            clone(grads),
            tx.init(params),
            clone(params),
            optim.LocalInfo(threads),
            threads=threads,
        )[:2]
        for threads in (1, 2, 3)
    ]
    for other in results[1:]:
        pairs = zip(tree.leaves(results[0]), tree.leaves(other), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_gradients_must_have_the_leaves_of_the_parameters():
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    tx = optim.sgd(0.1)
    for grads in ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": None}):
        with pytest.raises(TreeMismatchError, match="same leaves"):
            optim.apply(tx, grads, tx.init(params), params, optim.LocalInfo())
        with pytest.raises(TreeMismatchError, match="same leaves"):
            optim.apply_updates(params, grads)
