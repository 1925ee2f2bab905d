"""tiled: the values and gradients of the whole function, with the intermediates of one chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc
from tests.harness import assert_equal, gathered, integers, ranks
from tests.passes.interpreter import capture, check, peak_bytes
from zfunc import optim
from zfunc.passes.remat import rematerialise
from zfunc.program.ir import Compute, Gather
from zfunc.tiling import tiled

ROWS, WIDTH, VOCAB = 7, 4, 10


def data(rows: int = ROWS, vocab: int = VOCAB) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Small integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(3)
    params = {
        "up": integers(generator, (WIDTH, vocab)),
        "down": integers(generator, (vocab, WIDTH)),
    }
    return params, {"x": integers(generator, (2, rows, WIDTH))}


def dense(loss: Callable[..., Tensor], params: Any, batch: Any) -> list[Tensor]:
    """Loss and gradients by plain autograd."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    value = loss(leaves, batch)
    return [value.detach(), *torch.autograd.grad(value, list(leaves.values()))]


def mlp(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    return torch.relu(x @ p["up"]) @ p["down"]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_rows_give_the_values_and_gradients_of_the_whole(dim: int, n: int) -> None:
    def loss(wrap: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda p, b: wrap(mlp)(b["x"], p).square().sum()

    params, batch = data()
    expected = dense(loss(lambda fn: fn), params, batch)
    tiles = loss(lambda fn: tiled(fn, dim, n))
    assert_equal(dense(tiles, params, batch), expected)
    check(tiles, params, batch)
    program = rematerialise(capture(tiles, params, batch))
    num = min(n, batch["x"].shape[dim])
    regions = {op.regions for op in program.ops if isinstance(op, Compute) and op.regions}
    assert len(regions) == num


@pytest.mark.parametrize("n", [1, 3, 4])
def test_columns_of_a_weight_and_products_that_are_added(n: int) -> None:
    def by_rows(p: Any, b: Any) -> Tensor:
        return tiled(F.linear, (None, 0), n, out=-1)(b["x"], p["down"]).square().sum()

    def by_columns(p: Any, b: Any) -> Tensor:
        return tiled(F.linear, (-1, 1), n, out="sum")(b["x"], p["down"]).square().sum()

    def whole(p: Any, b: Any) -> Tensor:
        return F.linear(b["x"], p["down"]).square().sum()

    params, batch = data()
    params = {"down": params["down"]}
    expected = dense(whole, params, batch)
    for loss in (by_rows, by_columns):
        assert_equal(dense(loss, params, batch), expected)
        check(loss, params, batch)


def test_trees_keywords_and_results_of_several_kinds() -> None:
    def part(tensors: dict[str, Any], scale: float, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        assert tensors["name"] == "x" and tensors["mask"].shape[0] == tensors["x"].shape[0]
        y = tensors["x"] * scale + shift
        return y.sum(), (y * tensors["mask"]).sum(0)

    x, mask, shift = torch.arange(10.0).view(5, 2), torch.ones(5, 1), torch.tensor([1.0, 2.0])
    arguments = {"name": "x", "x": x, "mask": mask}, 2.0
    total, columns = tiled(part, 0, 2, out="sum")(*arguments, shift=shift)
    expected = part(*arguments, shift=shift)
    assert_equal([total, columns], list(expected))


def test_gradients_of_weights_are_added_from_the_first_chunk_to_the_last() -> None:
    # In float32 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1.
    weight = torch.ones(1)
    for rows, expected in (([1e8, -1e8, 1.0], 1.0), ([1e8, 1.0, -1e8], 0.0)):
        batch = {"x": torch.tensor(rows)}

        def loss(p: Any, b: Any) -> Tensor:
            return tiled(lambda x: (x * p["w"]).sum(), 0, 3, out="sum")(b["x"])

        _, grad = dense(loss, {"w": weight}, batch)
        step = zfunc.shard(loss, zfunc.mesh())
        state = step.init({"w": weight}, optim.sgd(0.1))
        _, traced = step.value_and_grad(state.params, batch)
        assert grad.item() == gathered(traced)[0].item() == expected


def logits_loss(p: Any, b: Any, n: int | None = None) -> Tensor:
    def part(h: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(h @ weight, targets, reduction="sum")

    wrapped = part if n is None else tiled(part, (0, 0, None), n, out="sum")
    h = torch.tanh(b["x"].flatten(0, 1) @ p["mix"])
    return wrapped(h, b["targets"].flatten(), p["up"]) / b["targets"].numel()


def logits_data(rows: int, vocab: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    params = {
        "mix": torch.randn(16, 16, generator=generator).double(),
        "up": torch.randn(16, vocab, generator=generator).double(),
    }
    x = torch.randn(2, rows, 16, generator=generator).double()
    return params, {"x": x, "targets": torch.randint(0, vocab, (2, rows), generator=generator)}


def train(mesh: zfunc.Mesh, n: int | None, capture_by: str) -> tuple[list[Tensor], str, int]:
    """Leaves after two steps, the rung, and how often a leaf is gathered."""
    params, batch = logits_data(9, 30)
    step = zfunc.shard(lambda p, b: logits_loss(p, b, n), mesh, capture=capture_by)
    state = step.init(params, optim.sgd(0.5))
    for _ in range(2):
        state, _ = step(state, batch)
    (report,) = step.explain().signatures
    return gathered(state.params), report.rung, len(report.gathered_again)


@pytest.mark.parametrize("rung", ["traced", "dynamic"])
@pytest.mark.parametrize("n", [1, 4, 18])
def test_a_loss_in_chunks_trains_as_a_whole_one_on_many_ranks(n: int, rung: str) -> None:
    (expected, *_), *_ = ranks(2, train, None, "traced")
    for leaves, found, again in ranks(2, train, n, rung):
        assert_equal(leaves, expected, tol=1e-12)
        assert (found, again) == (rung, 0)


def test_weights_are_gathered_once_for_all_chunks_where_the_budget_allows() -> None:
    params, batch = logits_data(9, 30)
    mesh = zfunc.abstract_mesh({"shard": 4})

    def num_gathers(live_bytes: int | None) -> int:
        budget = zfunc.Prefetch(live_bytes=live_bytes)
        step = zfunc.shard(lambda p, b: logits_loss(p, b, 6), mesh, prefetch=budget)
        like = step.abstract(params, optim.sgd(0.1))
        ops = step.lower(like, batch).program.ops
        return sum(len(op.leaves) for op in ops if isinstance(op, Gather))

    assert num_gathers(None) == 2
    with pytest.raises(zfunc.BudgetError) as refused:
        num_gathers(1)
    assert num_gathers(refused.value.needed_bytes) <= 4


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_the_peak_is_that_of_one_chunk(n: int) -> None:
    params, batch = logits_data(64, 2000)
    wide = 128 * 2000 * 8

    def extra(n: int | None) -> int:
        """Bytes at the peak beyond what is as wide as the hidden states, not the vocabulary."""
        return peak_bytes(rematerialise(capture(lambda p, b: logits_loss(p, b, n), params, batch)))

    whole, part = extra(None), extra(n)
    chunks = -(-whole // wide)  # tensors of the size of all logits, at the peak of the whole
    narrow = 6 * 128 * 16 * 8 + 3 * params["up"].nbytes
    assert whole >= 2 * wide
    assert part <= chunks * wide / n + narrow


def test_dropout_is_replayed_in_every_chunk() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        part = tiled(lambda x: F.dropout(torch.tanh(x @ p["up"]), 0.5) @ p["down"], 1, 3)
        return part(b["x"]).square().sum()

    params, batch = data()
    after = check(loss, params, batch)
    again = [str(op.target) for op in after.ops if getattr(op, "phase", "") == "recompute"]
    assert sum("bernoulli" in name for name in again) == 3


def test_tied_weights_inside_and_outside_of_the_chunks() -> None:
    def loss(wrap: Callable[..., Any]) -> Callable[..., Tensor]:
        def whole(p: Any, b: Any) -> Tensor:
            h = b["x"] @ p["up"] @ p["down"]
            part = wrap(lambda h: (h @ p["up"]).square().sum())
            return part(h)

        return whole

    params, batch = data()
    expected = dense(loss(lambda fn: fn), params, batch)
    tiles = loss(lambda fn: tiled(fn, 1, 3, out="sum"))
    check(tiles, params, batch)
    assert_equal(dense(tiles, params, batch), expected)


def test_no_rows_at_all() -> None:
    out = tiled(lambda x: x * 2, 0, 3)(torch.zeros(0, 2))
    assert out.shape == (0, 2)


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        ((0, 0), None, "n="),
        (((None,), 2), None, "dim="),
        ((1, 2), (torch.zeros(3),), r"args\[0\] has no dim 1"),
        (((0, 0), 2), (torch.zeros(3),), "too few"),
        (((0, 0), 2), (torch.zeros(3), torch.zeros(4)), r"(?s)one size.*args\[1\]"),
        ((0, 2), (3.0,), "none"),
    ],
)
def test_what_cannot_be_split_is_refused(make: Any, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrapped = tiled(lambda *args: args[0], *make)
        assert call is not None
        wrapped(*call)


def test_results_that_cannot_be_put_together_are_refused() -> None:
    with pytest.raises(ValueError, match="out='sum'"):
        tiled(lambda x: x.sum(), 0, 2)(torch.zeros(4))
    with pytest.raises(ValueError, match="tensors"):
        tiled(lambda x: "text", 0, 2)(torch.zeros(4))
    with pytest.raises(ValueError, match="out="):
        tiled(lambda x: x, 0, 2, out="mean")


def test_pieces_are_not_split() -> None:
    pieces = zfunc.scatter(torch.zeros(4), zfunc.mesh(), zfunc.Flat())
    with pytest.raises(ValueError, match=r"args\[0\] is in pieces"):
        tiled(lambda x: x, 0, 2)(pieces)
