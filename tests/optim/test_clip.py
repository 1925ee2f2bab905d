"""Clipping by the global norm: exact below the bound, right above it, never of stale values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.optim.cutting import clone
from tests.optim.strategies import integers, shapes
from zfunc import optim, tree


@dataclasses.dataclass(frozen=True)
class Spy:
    """Notes whether it was asked with the very tensors of the raw gradients."""

    raw: Any
    asked: list[bool]

    def sum_squares(self, updates: Any) -> Any:
        known = {id(x) for x in tree.leaves(self.raw)}
        self.asked.append(all(id(x) in known for x in tree.leaves(updates)))
        return optim.LocalInfo().sum_squares(updates)


def norm_of(updates: Any) -> float:
    """The norm by python's own arithmetic."""
    return math.sqrt(math.fsum(v * v for x in tree.leaves(updates) for v in x.reshape(-1).tolist()))


@given(shapes, st.floats(0.25, 40.0))
def test_norm_after_clip(shape_of: Any, max_norm: float):
    grads, tx = integers(shape_of, 1), optim.clip_by_global_norm(max_norm)
    before = norm_of(grads)
    updates, state = tx.update(clone(grads), tx.init(grads), grads, info=optim.LocalInfo())
    assert state == ()
    if before <= max_norm:
        assert all(torch.equal(updates[name], grads[name]) for name in grads)
        return
    factor = torch.tensor(max_norm / before, dtype=torch.float32)
    assert all(torch.equal(updates[name], grads[name] * factor) for name in grads)
    assert norm_of(updates) == pytest.approx(max_norm, rel=3 * 2**-24)


def test_updates_at_the_bound_are_handed_on_untouched():
    grads = {"a": torch.tensor([3.0, 4.0])}
    tx = optim.clip_by_global_norm(5.0)
    updates, _ = tx.update(grads, (), grads, info=optim.LocalInfo())
    assert updates["a"] is grads["a"]
    assert grads["a"]._version == 0


def test_differs_from_torch_by_its_1e6():
    grads = {name: x.double() for name, x in integers({"a": (5, 4), "b": (3,)}, 3).items()}
    leaf = torch.zeros(23, dtype=torch.float64, requires_grad=True)
    leaf.grad = torch.cat([x.reshape(-1) for x in grads.values()])
    norm = float(torch.nn.utils.clip_grad_norm_([leaf], 2.0))
    tx = optim.clip_by_global_norm(2.0)
    updates, _ = tx.update(grads, (), grads, info=optim.LocalInfo())
    ours = torch.cat([x.reshape(-1) for x in updates.values()])
    torch.testing.assert_close(ours * (norm / (norm + 1e-6)), leaf.grad, rtol=1e-12, atol=0)


def test_nan_is_handed_on_and_infinity_gives_nan():
    for value, expected in ((math.nan, [1.0, math.nan]), (math.inf, [0.0, math.nan])):
        grads = {"a": torch.tensor([1.0, value])}
        tx = optim.clip_by_global_norm(2.0)
        updates, _ = tx.update(grads, (), grads, info=optim.LocalInfo())
        torch.testing.assert_close(
            updates["a"], torch.tensor(expected), equal_nan=True, rtol=0, atol=0
        )


def test_complex_leaves_count_both_parts():
    grads = {"a": torch.tensor([3 + 4j], dtype=torch.complex64)}
    assert optim.global_norm(grads, info=optim.LocalInfo()) == 5.0


def test_an_empty_tree_has_norm_zero():
    assert optim.global_norm({"a": None}, info=optim.LocalInfo()) == 0.0


CLIP = optim.clip_by_global_norm(1.0)


@pytest.mark.parametrize("through", ["update", "apply"])
@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (CLIP, [True]),
        (optim.chain(CLIP, optim.adamw(0.1)), [True]),
        (optim.chain(CLIP, optim.sgd(0.1)), [True]),
        (optim.chain(optim.scale(2.0), CLIP), [False]),
        (optim.chain(CLIP, CLIP, optim.sgd(0.1)), [True, False]),
        (optim.chain(optim.scale(2.0), optim.masked(optim.chain(CLIP, CLIP), True)), [False] * 2),
        (optim.masked(CLIP, True), [True]),
        (optim.partition({"a": optim.chain(CLIP, optim.adam(0.1))}, "a"), [True]),
        (
            optim.chain(CLIP, optim.partition({"a": optim.chain(CLIP, optim.adam(0.1))}, "a")),
            [True, False],
        ),
    ],
)
def test_only_raw_gradients_are_asked_for_by_identity(through: str, tx: Any, expected: list[bool]):
    """Changed values never pass for the raw gradients, though the buffers are theirs."""
    params = integers({"a": (3, 4), "b": (2,)}, 0)
    grads = integers({"a": (3, 4), "b": (2,)}, 1)
    spy = Spy(grads, [])
    if through == "apply":
        optim.apply(tx, grads, tx.init(params), params, spy)
    else:
        tx.update(grads, tx.init(params), params, info=spy)
    assert spy.asked == expected


def test_a_clip_after_a_change_sees_the_changed_values():
    grads = {"a": torch.tensor([3.0, 4.0])}
    tx = optim.chain(optim.scale(2.0), optim.clip_by_global_norm(1.0))
    updates, _ = tx.update(grads, tx.init(grads), grads, info=optim.LocalInfo())
    torch.testing.assert_close(updates["a"], torch.tensor([0.6, 0.8]))


def test_apply_reports_the_clipped_norm():
    params = {"a": torch.zeros(2)}
    for tx, expected in (
        (optim.sgd(0.1), None),
        (optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1)), 1.0),
        (optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), 1.0),
        (optim.chain(optim.clip_by_global_norm(9.0), optim.adamw(0.1)), 5.0),
        (optim.clip_by_global_norm(9.0), 5.0),
        (optim.chain(optim.scale(2.0), optim.clip_by_global_norm(1.0)), None),
    ):
        grads = {"a": torch.tensor([3.0, 4.0])}
        _, _, applied = optim.apply(tx, grads, tx.init(params), clone(params), optim.LocalInfo())
        assert applied.grad_norm_clipped == expected


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_the_bound_must_be_positive(max_norm: float):
    with pytest.raises(ValueError, match="max_norm"):
        optim.clip_by_global_norm(max_norm)
