"""Laws of chain, masked and partition, as values and bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.optim.cutting import clone, cut
from tests.optim.strategies import elementwise, integers, shapes, transforms
from zfunc import optim, schedules, tree
from zfunc.errors import TreeMismatchError
from zfunc.layout import Flat

SHAPES = {"a": (2, 3), "b": (4,), "c": ()}


def updates_of(tx: Any, shape_of: Any) -> tuple[list[Any], Any]:
    """What a transform makes of three gradients, and its last state."""
    params, collected = integers(shape_of, 0), []
    state, info = tx.init(params), optim.LocalInfo()
    for seed in (1, 2, 3):
        updates, state = tx.update(integers(shape_of, seed), state, params, info=info)
        collected.append(clone(updates))
    return collected, state


def assert_equal(got: Any, expected: Any) -> None:
    """Same structure, same bits."""
    assert tree.structure(got) == tree.structure(expected)
    pairs = zip(tree.leaves(got), tree.leaves(expected), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@given(transforms, transforms, transforms)
def test_chain_is_associative(a: Any, b: Any, c: Any):
    left, right = optim.chain(optim.chain(a, b), c), optim.chain(a, optim.chain(b, c))
    assert left == right == optim.chain(a, b, c)


@given(transforms)
def test_identity_is_the_unit_of_chain(tx: Any):
    unit = optim.identity()
    assert optim.chain(tx, unit) == optim.chain(unit, tx) == optim.chain(tx) == tx


@given(transforms, transforms, shapes)
def test_chain_applies_one_after_the_other(a: Any, b: Any, shape_of: Any):
    params, info = integers(shape_of, 0), optim.LocalInfo()
    states = [a.init(params), b.init(params)]
    got, _ = updates_of(optim.chain(a, b), shape_of)
    for seed, together in zip((1, 2, 3), got, strict=True):
        updates = integers(shape_of, seed)
        for i, tx in enumerate((a, b)):
            updates, states[i] = tx.update(updates, states[i], params, info=info)
        assert_equal(together, updates)


def test_identity_changes_nothing():
    grads, info = integers(SHAPES, 1), optim.LocalInfo()
    tx = optim.identity()
    updates, state = tx.update(grads, tx.init(grads), grads, info=info)
    assert all(updates[name] is grads[name] for name in grads)
    assert state == ()


@given(transforms, shapes)
def test_masked_by_true_is_the_transform(tx: Any, shape_of: Any):
    got, state = updates_of(optim.masked(tx, True), shape_of)
    expected, inner = updates_of(tx, shape_of)
    assert_equal(got, expected)
    assert_equal(state.inner, inner)


@given(transforms, shapes)
def test_masked_by_false_is_identity(tx: Any, shape_of: Any):
    got, _ = updates_of(optim.masked(tx, False), shape_of)
    assert_equal(got, updates_of(optim.identity(), shape_of)[0])


@given(transforms, shapes)
def test_partition_with_one_label_is_the_transform(tx: Any, shape_of: Any):
    got, state = updates_of(optim.partition({"all": tx}, "all"), shape_of)
    expected, inner = updates_of(tx, shape_of)
    assert_equal(got, expected)
    assert_equal(state.inner["all"], inner)


@given(elementwise, elementwise, shapes, st.sets(st.sampled_from("abcd")))
def test_partition_is_each_transform_on_its_own(a: Any, b: Any, shape_of: Any, first: set[str]):
    def label(path: str, shape: tuple[int, ...]) -> str:
        return "first" if path in first else "second"

    got, _ = updates_of(optim.partition({"first": a, "second": b}, label), shape_of)
    alone = {"first": updates_of(a, shape_of)[0], "second": updates_of(b, shape_of)[0]}
    for step, updates in enumerate(got):
        expected = {name: alone[label(name, ())][step][name] for name in shape_of}
        assert_equal(updates, expected)


@given(transforms, shapes)
def test_partition_is_masked_twice(tx: Any, shape_of: Any):
    mask = {name: i % 2 == 0 for i, name in enumerate(sorted(shape_of))}
    labels = {name: "on" if on else "off" for name, on in mask.items()}
    got, _ = updates_of(optim.partition({"on": tx, "off": optim.identity()}, labels), shape_of)
    assert_equal(got, updates_of(optim.masked(tx, mask), shape_of)[0])


@given(elementwise, shapes)
def test_frozen_leaves_have_no_state(tx: Any, shape_of: Any):
    params = integers(shape_of, 0)
    frozen = {name: None for name in params}
    # What is left without leaves are the counts of schedules, which belong to no leaf.
    schedule_counts = len(tree.leaves(tx.init(frozen)))
    first = sorted(params)[0]
    one = tree.leaves(tx.init({**frozen, first: params[first]}))
    per_leaf = len(one) - schedule_counts
    assert len(tree.leaves(tx.init(params))) == schedule_counts + per_leaf * len(params)
    updates, _ = tx.update(
        {**frozen, first: params[first]},
        tx.init({**frozen, first: params[first]}),
        {**frozen, first: params[first]},
        info=optim.LocalInfo(),
    )
    assert [name for name, update in updates.items() if update is not None] == [first]


def test_masks_see_paths_and_whole_shapes():
    whole = {"a": torch.zeros(2, 3), "b": torch.zeros(7)}
    seen: list[tuple[str, tuple[int, ...]]] = []

    def mask(path: str, shape: tuple[int, ...]) -> bool:
        seen.append((path, shape))
        return path == "h/0/b"

    for rank in (0, 1):
        params = {"h": [cut(whole, {"a": Flat(), "b": Flat()}, 2)[rank]]}
        state = optim.masked(optim.trace(0.5), mask).init(params)
        assert [x.numel() for x in tree.leaves(state)] == [4 - rank]
    assert seen == [("h/0/a", (2, 3)), ("h/0/b", (7,))] * 2


def test_prefix_trees_and_frozen_holes():
    params = {"body": [torch.ones(2), torch.ones(3)], "head": None, "tail": torch.ones(4)}
    state = optim.masked(optim.trace(0.5), {"body": True, "head": True, "tail": False}).init(params)
    assert [x.numel() for x in tree.leaves(state)] == [2, 3]


def test_a_mask_that_is_no_prefix_is_refused():
    params = {"h": [{"w": torch.ones(2)}]}
    for tx in (
        optim.masked(optim.scale(1.0), {"h": [{"v": True}]}),
        optim.add_decayed_weights(0.1, mask={"h": [{"v": True}]}),
    ):
        with pytest.raises(TreeMismatchError, match=r"mask.*prefix"):
            tx.init(params)
    with pytest.raises(TreeMismatchError, match=r"'yes' for params\['h'\]\[0\]\['w'\]"):
        optim.masked(optim.scale(1.0), {"h": "yes"}).init(params)
    with pytest.raises(TreeMismatchError, match=r"None for params\['h'\]\[0\]\['w'\]"):
        optim.masked(optim.scale(1.0), lambda path, shape: None).init(params)


def test_a_label_without_a_transform_is_refused():
    params = {"h": [{"w": torch.ones(2)}]}
    tx = optim.partition({"slow": optim.scale(1.0)}, {"h": [{"w": "fast"}]})
    with pytest.raises(TreeMismatchError, match=r"(?s)'fast' for params\['h'\]\[0\]\['w'\].*slow"):
        tx.init(params)
    with pytest.raises(TreeMismatchError, match=r"labels.*prefix"):
        optim.partition({"slow": optim.scale(1.0)}, {"g": "slow"}).init(params)


def test_learning_rates_are_reported():
    params = {"a": torch.ones(2), "b": torch.ones(3)}
    schedule = schedules.linear(1.0, 0.0, 4)
    slow, fast = optim.sgd(0.5), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule))
    cases = [
        (slow, 0.5),
        (fast, 1.0),
        (optim.masked(fast, True), 1.0),
        (optim.scale_by_adam(), None),
        (optim.identity(), None),
        (
            optim.partition({"a": slow, "b": fast, "c": optim.identity()}, {"a": "a", "b": "b"}),
            {"a": 0.5, "b": 1.0},
        ),
        (optim.chain(slow, optim.scale(2.0), optim.masked(slow, True)), {"0": 0.5, "2": 0.5}),
        (optim.partition({"a": optim.chain(slow, fast)}, "a"), {"a/0": 0.5, "a/4": 1.0}),
        (optim.chain(slow, optim.partition({"a": fast}, "a")), {"0": 0.5, "1/a": 1.0}),
    ]
    for tx, expected in cases:
        assert optim.learning_rate_of(tx, tx.init(params)) == expected


def test_rates_follow_their_transforms_own_count():
    tx = optim.partition(
        {
            "a": optim.sgd(schedules.linear(1.0, 0.0, 4)),
            "b": optim.sgd(schedules.join([schedules.constant(1.0), schedules.constant(3.0)], [2])),
        },
        {"a": "a", "b": "b"},
    )
    params, info = {"a": torch.zeros(1), "b": torch.zeros(1)}, optim.LocalInfo()
    state, seen = tx.init(params), []
    for _ in range(3):
        rate = optim.learning_rate_of(tx, state)
        grads = {name: torch.ones(1) for name in params}
        updates, state = tx.update(grads, state, params, info=info)
        assert {name: -float(update) for name, update in updates.items()} == rate
        seen.append(rate)
    assert seen == [{"a": 1.0, "b": 1.0}, {"a": 0.75, "b": 1.0}, {"a": 0.5, "b": 3.0}]


@pytest.mark.parametrize("through", ["update", "apply"])
def test_every_rate_may_be_a_schedule(through: str):
    """A schedule means the same as the number that it gives at each update."""
    course = schedules.linear(1.0, 0.0, 4)
    makers = [
        optim.scale_by_schedule,
        optim.scale_by_learning_rate,
        optim.add_decayed_weights,
        optim.sgd,
        lambda rate: optim.adamw(0.125, weight_decay=rate),
        lambda rate: optim.adamw(rate, weight_decay=0.125),
    ]
    for make in makers:
        tx, info = make(course), optim.LocalInfo()
        numbers = [
            optim.scale(rate) if make is optim.scale_by_schedule else make(rate)
            for rate in (1.0, 0.75, 0.5)
        ]
        params = integers(SHAPES, 0)
        state, plain = tx.init(params), numbers[0].init(params)
        for seed, number in enumerate(numbers):
            grads = integers(SHAPES, seed)
            if through == "apply":
                got, state, _ = optim.apply(tx, clone(grads), state, clone(params), info)
                expected, plain, _ = optim.apply(number, grads, plain, clone(params), info)
            else:
                got, state = tx.update(clone(grads), state, params, info=info)
                expected, plain = number.update(grads, plain, params, info=info)
            assert_equal(got, expected)


def test_counts_are_int64_cpu_scalars():
    params = {"a": torch.ones(2), "b": torch.ones(3)}
    adam, _, rate = optim.adamw(schedules.constant(1.0)).init(params)
    for count in (*tree.leaves(adam.count), *tree.leaves(rate)):
        assert (count.dtype, count.shape, count.device.type) == (torch.int64, (), "cpu")
    assert set(adam.count) == {"a", "b"}
