"""Updates: clips, decay masks, frozen bases, and steps that must be left out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.hostile.case import RATE, case, ints
from tests.hostile.trees import forward, mlp, rows
from tests.oracle import Adamw, Sgd
from zfunc import optim


def _thousands(rank: int, step: int) -> Any:
    return rows(rank, step) | {"scale": 1000.0 ** (rank % 3 - step)}


@case(
    mlp,
    _thousands,
    steps=3,
    tol=1e-10,
    tx=(optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(RATE)), Sgd(RATE)),
    oracle={"clip": 1.0},
)
def clipping_of_gradients_that_differ_by_thousands(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum() * b["scale"]


@case(
    mlp,
    rows,
    steps=3,
    tol=1e-10,
    tx=(optim.adamw(0.01, mask=lambda path, shape: len(shape) > 1), Adamw(0.01)),
    oracle={"decays": [True, False, True]},
)
def weight_decay_by_shape(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().mean()


@case(
    lambda rank: mlp() | {"unused": ints(5, 3)},
    rows,
    steps=3,
    tol=1e-10,
    tx=(optim.adamw(0.01), Adamw(0.01)),
)
def decay_of_a_leaf_never_used(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().mean()


def _lora(rank: int) -> Any:
    lora = {"a": {"down": ints(5, 4, 2), "up": ints(6, 2, 3)}, "scale": ints(7)}
    return {"base": mlp(), "lora": lora, "steps": torch.tensor(3)}


@case(
    _lora,
    rows,
    train=[False] * 3 + [True] * 3 + [False],
    options={"trainable": {"base": False, "lora": True, "steps": True}},
)
def a_frozen_base_with_low_rank_changes(p: Any, b: Any) -> Tensor:
    change = p["lora"]["a"]["down"] @ p["lora"]["a"]["up"] * p["lora"]["scale"]
    base = p["base"] | {"a": p["base"]["a"] + change}
    return forward(base, b["x"]).square().sum() * p["steps"]


@case(mlp, rows, rung="traced forward", train=[False] * 3, options={"trainable": False})
def everything_frozen(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()


def _bad(value: float) -> Any:
    """Batches of which rank 0 has a bad one in the second of three steps."""

    def batch(rank: int, step: int) -> Any:
        bad = value if (rank, step) == (0, 1) else 1.0
        return rows(rank, step) | {"times": torch.tensor(bad, dtype=torch.float64)}

    return batch


@case(mlp, _bad(math.nan), steps=3)
def a_loss_that_is_nan_on_one_rank(p: Any, b: Any) -> Tensor:
    return (forward(p, b["x"]) * b["times"]).square().sum()


@case(mlp, _bad(math.inf), steps=3)
def a_loss_that_is_infinite_on_one_rank(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).sum() + b["times"]


@case(mlp, _bad(0.0), steps=3, tol=1e-10)
def a_gradient_that_is_infinite_on_one_rank(p: Any, b: Any) -> Tensor:
    """The root of 0 is 0, its derivative is not finite."""
    return ((p["a"].abs() + 1) * b["times"]).sqrt().sum() + forward(p, b["x"]).sum()


@case(
    mlp,
    _bad(math.nan),
    steps=3,
    tol=1e-10,
    tx=(optim.adamw(0.01), Adamw(0.01)),
    rung="dynamic autograd",
    options={"capture": "dynamic", "donate": False},
)
def a_nan_on_the_dynamic_rung(p: Any, b: Any) -> Tensor:
    return (forward(p, b["x"]) * b["times"]).square().sum()
