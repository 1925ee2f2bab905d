"""Random numbers: of torch's generator, of a key, of a generator of the loss's own, recomputed.

The dense run seeds torch's generator with the number that comes with the batch, the rank does so
before it calls the step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zfunc
from tests.hostile.case import case, ints
from tests.hostile.trees import forward, mlp
from zfunc.random import bernoulli, fold_in, split

DYNAMIC = "dynamic autograd"


def seeded_rows(rank: int, step: int) -> dict[str, Any]:
    seed = torch.tensor(10 * step + rank)
    return {"x": ints(rank + step, 3, 4), "seed": seed}


def seed(batch: Any) -> None:
    first = batch[0] if isinstance(batch, list) else batch
    torch.manual_seed(int(first["seed"]))


def dropped(p: Any, b: Any) -> Tensor:
    h = F.dropout(torch.relu(b["x"] @ p["a"] + p["b"]), 0.5)
    return F.dropout(h @ p["c"], 0.25).square().sum()


def dense(p: Any, b: Any) -> Tensor:
    """Only the first of several micro-batches has a seed: the others draw what follows."""
    if b["seed"] >= 0:
        torch.manual_seed(int(b["seed"]))
    return dropped(p, b)


BY_SEED: dict[str, Any] = {"before": seed, "dense": dense, "tol": 1e-10}


@case(mlp, seeded_rows, **BY_SEED)
def dropout_by_the_global_generator(p: Any, b: Any) -> Tensor:
    return dropped(p, b)


def dropped_after_a_draw(p: Any, b: Any) -> Tensor:
    torch.rand(5)
    return dropped(p, b)


def dense_after_a_draw(p: Any, b: Any) -> Tensor:
    torch.manual_seed(int(b["seed"]))
    return dropped_after_a_draw(p, b)


@case(mlp, seeded_rows, **(BY_SEED | {"dense": dense_after_a_draw}))
def a_draw_that_nobody_reads(p: Any, b: Any) -> Tensor:
    return dropped_after_a_draw(p, b)


def _two(rank: int, step: int) -> Any:
    batch = seeded_rows(rank, step)
    return [batch, {"x": ints(7 + rank, 2, 4), "seed": torch.tensor(-1)}]


@case(mlp, _two, options={"accum": 2}, **BY_SEED)
def dropout_in_two_micro_batches(p: Any, b: Any) -> Tensor:
    return dropped(p, b)


@case(mlp, seeded_rows, **BY_SEED)
def dropout_under_remat(p: Any, b: Any) -> Tensor:
    hidden = zfunc.remat(lambda x: F.dropout(torch.relu(x @ p["a"] + p["b"]), 0.5))
    outer = zfunc.remat(lambda x: F.dropout(hidden(x) @ p["c"], 0.25))
    return outer(b["x"]).square().sum()


@case(mlp, seeded_rows, options={"remat": zfunc.policies.nothing}, **BY_SEED)
def dropout_in_a_loss_that_is_recomputed(p: Any, b: Any) -> Tensor:
    return dropped(p, b)


@case(mlp, seeded_rows, options={"remat": zfunc.policies.matmuls}, **BY_SEED)
def dropout_where_products_are_kept(p: Any, b: Any) -> Tensor:
    return dropped(p, b)


@case(mlp, seeded_rows, options={"remat": zfunc.policies.budget(100)}, **BY_SEED)
def dropout_under_a_budget(p: Any, b: Any) -> Tensor:
    return dropped(p, b)


def dense_tiles(p: Any, b: Any) -> Tensor:
    """The last row draws first."""
    torch.manual_seed(int(b["seed"]))
    rows = [F.dropout(torch.relu(row @ p["a"] + p["b"]), 0.5) for row in reversed(b["x"].split(1))]
    return (torch.cat(rows[::-1]) @ p["c"]).square().sum()


@case(mlp, seeded_rows, **(BY_SEED | {"dense": dense_tiles}))
def dropout_in_tiles(p: Any, b: Any) -> Tensor:
    part = zfunc.tiled(lambda x: F.dropout(torch.relu(x @ p["a"] + p["b"]), 0.5), 0, 3)
    return (part(b["x"]) @ p["c"]).square().sum()


@case(
    mlp,
    seeded_rows,
    rung=DYNAMIC,
    options={"capture": "dynamic"},
    **(BY_SEED | {"dense": dense_tiles}),
)
def dropout_in_tiles_on_the_dynamic_rung(p: Any, b: Any) -> Tensor:
    part = zfunc.tiled(lambda x: F.dropout(torch.relu(x @ p["a"] + p["b"]), 0.5), 0, 3)
    return (part(b["x"]) @ p["c"]).square().sum()


@case(mlp, seeded_rows, rung=DYNAMIC, **BY_SEED)
def dropout_under_torch_checkpoint(p: Any, b: Any) -> Tensor:
    def hidden(x: Tensor) -> Tensor:
        return F.dropout(torch.relu(x @ p["a"] + p["b"]), 0.5)

    h = checkpoint(hidden, b["x"], use_reentrant=False)
    return F.dropout(h @ p["c"], 0.25).square().sum()


@case(mlp, seeded_rows, rung=DYNAMIC, options={"capture": "dynamic"}, **BY_SEED)
def dropout_under_remat_on_the_dynamic_rung(p: Any, b: Any) -> Tensor:
    hidden = zfunc.remat(lambda x: F.dropout(torch.relu(x @ p["a"] + p["b"]), 0.5))
    return F.dropout(hidden(b["x"]) @ p["c"], 0.25).square().sum()


def _folded(rank: int, step: int, micro: int) -> Tensor:
    """The key that DESIGN promises: of the state, folded with step, rank and micro-batch."""
    key = split(zfunc.random.key(0))[1]
    return fold_in(fold_in(fold_in(key, step), rank), micro)


@case(mlp, seeded_rows, keys=_folded, worlds=(2, 4))
def dropout_by_key(p: Any, b: Any, *, key: Tensor) -> Tensor:
    first, second = split(key)
    h = torch.relu(b["x"] @ p["a"]) * bernoulli(first, 0.5, (b["x"].shape[0], 3))
    return (h @ p["c"] * bernoulli(second, 0.75, (4,))).square().sum()


@case(mlp, _two, keys=_folded, worlds=(2,), options={"accum": 2})
def dropout_by_key_in_micro_batches(p: Any, b: Any, *, key: Tensor) -> Tensor:
    return (forward(p, b["x"]) * bernoulli(key, 0.5, (4,))).square().sum()


@case(mlp, seeded_rows, keys=_folded, worlds=(2, 4))
def dropout_by_key_under_remat(p: Any, b: Any, *, key: Tensor) -> Tensor:
    block = zfunc.remat(lambda x: torch.relu(x @ p["a"]) * bernoulli(key, 0.5, (3,)))
    return (block(b["x"]) @ p["c"]).square().sum()


@case(mlp, seeded_rows, keys=_folded, worlds=(2,), options={"remat": zfunc.policies.names("mask")})
def dropout_by_key_whose_mask_is_kept(p: Any, b: Any, *, key: Tensor) -> Tensor:
    mask = zfunc.name(bernoulli(key, 0.5, (b["x"].shape[0], 3)), "mask")
    return (torch.relu(b["x"] @ p["a"]) * mask @ p["c"]).square().sum()


@case(mlp, seeded_rows, rung=DYNAMIC)
def dropout_under_remat_by_a_generator_from_outside(p: Any, b: Any) -> Tensor:
    generator = torch.Generator().manual_seed(5)

    @zfunc.remat
    def block(x: Tensor) -> Tensor:
        mask = torch.rand(x.shape[0], 3, generator=generator) > 0.5
        return torch.relu(x @ p["a"] * mask)

    return ((block(b["x"]) + block(b["x"])) @ p["c"]).square().sum()


@case(mlp, seeded_rows, rung=DYNAMIC)
def dropout_by_a_generator_of_its_own(p: Any, b: Any) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(4, generator=generator) > 0.5
    return (forward(p, b["x"]) * mask).square().sum()


@case(mlp, seeded_rows, rung=DYNAMIC)
def dropout_by_a_seed_of_its_own(p: Any, b: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        mask = torch.rand(4) > 0.5
    return (forward(p, b["x"]) * mask).square().sum()
