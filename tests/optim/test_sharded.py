"""Pieces of leaves, put together, are bit for bit what the whole leaves would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.optim.cutting import AllRanksInfo, clone, cut, join
from tests.optim.strategies import elementwise, integers
from zfunc import optim, schedules, tree
from zfunc.layout import Flat, P
from zfunc.sharded import Sharded, is_sharded, whole

WORLDS = st.integers(1, 4)
SIZES = st.dictionaries(
    st.sampled_from("abcd"),
    st.tuples(st.lists(st.integers(0, 6), max_size=3).map(tuple), st.booleans()),
    min_size=1,
)
CLIP = optim.clip_by_global_norm(2.0)


def drawn(shape_of: Any, seed: int) -> dict[str, Any]:
    """Small integers plus a fraction that float32 cannot hold: rounding happens everywhere."""
    return {name: x / 3 for name, x in integers(shape_of, seed).items()}


@given(SIZES, WORLDS, elementwise, st.booleans(), st.booleans())
def test_sharded_equals_unsharded(
    leaves: Any, world: int, tail: Any, clips: bool, through_apply: bool
):
    shape_of = {name: shape for name, (shape, _) in leaves.items()}
    specs = {name: Flat() if flat else P() for name, (_, flat) in leaves.items()}
    tx = optim.chain(CLIP, tail) if clips else tail
    draw = integers if clips else drawn
    params = drawn(shape_of, 0)
    state, info = tx.init(params), optim.LocalInfo()
    pieces = cut(params, specs, world)
    states = [tx.init(piece) for piece in pieces]
    for seed in (1, 2, 3):
        grads = draw(shape_of, seed)
        parts = cut(grads, specs, world)
        sums = info.sum_squares(grads)
        params, state = step(tx, grads, state, params, info, through_apply)
        for rank, part in enumerate(parts):
            known = AllRanksInfo(part, sums)
            pieces[rank], states[rank] = step(
                tx, part, states[rank], pieces[rank], known, through_apply
            )
    for name, joined in join(pieces).items():
        assert torch.equal(joined, params[name]), name


def step(tx: Any, grads: Any, state: Any, params: Any, info: Any, through_apply: bool) -> Any:
    """One update through `apply` or through the bare protocol."""
    if through_apply:
        return optim.apply(tx, grads, state, params, info)[:2]
    updates, state = tx.update(grads, state, params, info=info)
    return optim.apply_updates(params, updates), state


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_large_leaves_cut_anywhere(world: int):
    """Long enough for vector code with a remainder, and pieces that begin at odd places."""
    generator = torch.Generator().manual_seed(0)
    params, *steps = ({"a": torch.randn(1003, generator=generator)} for _ in range(4))
    for tx in (
        optim.adamw(0.01),
        optim.chain(optim.scale(1.5), optim.adamw(0.01)),
        optim.sgd(0.1, 0.9, nesterov=True),
        optim.chain(optim.add_decayed_weights(0.3), optim.sgd(0.1, 0.9)),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            start = tree.map(lambda x, dtype=dtype: x.to(dtype), params)
            expected, state = clone(start), tx.init(start)
            pieces = cut(start, {"a": Flat()}, world)
            states = [tx.init(piece) for piece in pieces]
            for wide in steps:
                grads = tree.map(lambda x, dtype=dtype: x.to(dtype), wide)
                parts = cut(grads, {"a": Flat()}, world)
                info = optim.LocalInfo()
                expected, state, _ = optim.apply(tx, grads, state, expected, info)
                for rank, part in enumerate(parts):
                    pieces[rank], states[rank], _ = optim.apply(
                        tx, part, states[rank], pieces[rank], info
                    )
            assert torch.equal(join(pieces)["a"], expected["a"]), (tx, dtype)


def test_state_follows_the_layout_of_the_parameters():
    params = cut({"a": torch.ones(5), "b": torch.ones(2, 2)}, {"a": Flat(), "b": P()}, 2)[1]
    state = optim.adamw(0.1).init(params)
    for moment in (state[0].mu, state[0].nu):
        for name, leaf in moment.items():
            assert isinstance(leaf, Sharded)
            assert leaf.layout == params[name].layout
            assert leaf.layout.path == f"params['{name}']"
    assert state[0].mu["a"].local.shape == (2,)
    assert all(isinstance(count, torch.Tensor) for count in state[0].count.values())


def test_counts_may_arrive_as_sharded_leaves():
    """The caller wraps plain tensors of the state as replicated leaves."""
    like = cut({"a": torch.ones(5), "b": torch.ones(4)}, {"a": Flat(), "b": Flat()}, 2)[0]
    for tx in (
        optim.adamw(schedules.linear(1.0, 0.0, 4)),
        optim.chain(optim.scale(1.0), optim.adamw(schedules.linear(1.0, 0.0, 4))),
    ):
        plain = tx.init(like)
        wrapped = tree.map(
            lambda x: x if is_sharded(x) else whole(x, like["a"].layout),
            tx.init(like),
            is_leaf=is_sharded,
        )
        params = [clone(like), clone(like)]
        for rate in (1.0, 0.75):
            grads = tree.map(torch.ones_like, like)
            info = optim.LocalInfo()
            params[0], plain, _ = optim.apply(tx, clone(grads), plain, params[0], info)
            params[1], wrapped, applied = optim.apply(tx, clone(grads), wrapped, params[1], info)
            assert applied.lr == rate
        counts = [x for x in tree.leaves(wrapped, is_leaf=is_sharded) if x.shape == ()]
        assert [(is_sharded(x), int(x.local)) for x in counts] == [(True, 2)] * 3
        assert torch.equal(params[0]["a"].local, params[1]["a"].local)
