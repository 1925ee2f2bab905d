"""Batches: of any length, weight and content, different on every rank and in every step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc
from tests.hostile.case import case, ints
from tests.hostile.trees import forward, mlp, rows


def tokens(rank: int, step: int) -> dict[str, Any]:
    """A number of tokens of the rank's and step's own, of which some count."""
    length = 1 + (2 * rank + 3 * step) % 5
    return {"x": ints(rank + 10 * step, length, 4), "counts": ints(rank + step, length) > 0}


@case(mlp, tokens, steps=3)
def lengths_of_every_rank_and_step(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()


@case(mlp, tokens, steps=3)
def losses_weighted_by_tokens(p: Any, b: Any) -> Any:
    each = forward(p, b["x"]).square().sum(-1)
    return (each * b["counts"]).sum(), b["counts"].sum()


@case(mlp, lambda rank, step: [tokens(rank + m, step) for m in range(3)], options={"accum": 3})
def micro_batches_weighted_by_tokens(p: Any, b: Any) -> Any:
    each = forward(p, b["x"]).square().sum(-1)
    return (each * b["counts"]).sum(), b["counts"].sum()


def _nothing_counts(rank: int, step: int) -> Any:
    batch = tokens(rank, step)
    return batch | {"counts": batch["counts"] & (step != 1)}


@case(mlp, _nothing_counts, steps=3)
def a_total_weight_of_zero(p: Any, b: Any) -> Any:
    each = forward(p, b["x"]).square().sum(-1)
    return (each * b["counts"]).sum(), b["counts"].sum()


def _weights_in_python(rank: int, step: int) -> Any:
    return {"x": ints(rank, 2, 4), "weight": 2.5 if rank else 1}


@case(mlp, _weights_in_python)
def weights_that_are_python_numbers(p: Any, b: Any) -> Any:
    return forward(p, b["x"]).square().sum(), b["weight"]


def _last(rank: int, step: int) -> Any:
    """Four rows, then a last batch of two rows, one row and none."""
    count = 4 if step == 0 else max(0, 2 - rank)
    return {"x": ints(rank + step, count, 4)}


@case(mlp, _last)
def a_last_batch_that_is_uneven_and_empty_summed(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()


@case(mlp, _last)
def a_last_batch_that_is_uneven_and_empty_averaged(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().mean()


@case(mlp, lambda rank, step: [_last(rank, step), _last(rank + 1, step)], options={"accum": 2})
def a_last_batch_that_is_empty_in_micro_batches(p: Any, b: Any) -> Any:
    return forward(p, b["x"]).square().sum(), float(b["x"].shape[0])


@case(mlp, tokens, options={"has_aux": True})
def rich_aux(p: Any, b: Any) -> Any:
    h = forward(p, b["x"])
    aux = {
        "hidden": h,
        "view": h.t()[1:],
        "param": p["b"],
        "input": b["x"],
        "rows": h.shape[0],
        "name": f"{h.shape[0]} rows",
        "none": None,
        "list": [1.5, {"t": h.max()}, ("a", True)],
        "empty": {},
        "mask": h > 0,
        "where": h.argmax(),
    }
    return h.square().sum(), aux


@case(
    mlp,
    lambda rank, step: [tokens(rank, step), tokens(rank + 1, step)],
    steps=1,
    options={"has_aux": True, "accum": 2},
)
def aux_of_micro_batches(p: Any, b: Any) -> Any:
    h = forward(p, b["x"])
    return h.square().sum(), {"h": h, "rows": h.shape[0]}


def _statistics(rank: int) -> Any:
    return mlp() | {"mean": ints(8, 3), "seen": torch.tensor(0)}


@case(_statistics, rows, tol=1e-10, options={"has_aux": True})
def batch_norm_statistics_through_aux(p: Any, b: Any) -> Any:
    """New statistics leave through aux; the ones that come in are leaves that get no gradient."""
    h = b["x"] @ p["a"] + p["b"]
    mean, var = h.mean(0), h.var(0, unbiased=False)
    running = 0.9 * p["mean"].detach() + 0.1 * mean.detach()
    out = (h - mean) / (var + 1e-5).sqrt()
    return (out @ p["c"]).square().mean(), {"mean": running, "seen": p["seen"] + 1}


@case(_statistics, rows, tol=1e-10, options={"has_aux": True})
def running_statistics_that_batch_norm_writes(p: Any, b: Any) -> Any:
    """Its schema does not say that it writes into them."""
    mean, var = p["mean"].detach().clone(), p["mean"].detach().square()
    h = F.batch_norm(b["x"] @ p["a"] + p["b"], mean, var, training=True)
    later = F.batch_norm(h * p["b"], mean, var)
    return ((h + later) @ p["c"]).square().mean(), {"mean": mean, "var": var}


def _any_keys(rank: int, step: int) -> Any:
    batch: dict[str, Any] = {"x": ints(rank + step, 2, 4), "name": f"batch {rank}", "none": None}
    if (rank + step) % 2:
        batch["extra"] = ints(step, 4)
    else:
        batch["scale"] = 0.5
    return batch


@case(mlp, _any_keys)
def keys_that_come_and_go(p: Any, b: Any) -> Tensor:
    x = b["x"] + b["extra"] if "extra" in b else b["x"] * b["scale"]
    return forward(p, x).square().sum() * len(b["name"])


@case(mlp, lambda rank, step: (rows(rank, step)["x"], 2.0 ** (-step)))
def a_python_number_that_changes(p: Any, b: Any) -> Tensor:
    return (forward(p, b[0]) * b[1]).square().sum()


def _requiring(rank: int, step: int) -> Any:
    x = rows(rank, step)["x"].requires_grad_()
    return {"x": x, "y": (x * 2)[:1], "p": torch.nn.Parameter(ints(step, 4))}


@case(mlp, _requiring)
def a_batch_that_requires_gradients(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"] + b["p"]).square().sum() + b["y"].sum()


def _inference(rank: int, step: int) -> Any:
    with torch.inference_mode():
        return {"x": rows(rank, step)["x"] * 1}


@case(mlp, _inference)
def a_batch_of_inference_tensors(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"].clone()).square().sum()


def _same(rank: int, step: int) -> Any:
    x = rows(rank, step)["x"]
    return [x, x, x[1:]]


@case(mlp, _same)
def the_same_tensor_twice_in_a_batch(p: Any, b: Any) -> Tensor:
    return forward(p, b[0] + 2 * b[1]).square().sum() + forward(p, b[2]).sum()


@case(mlp, lambda rank, step: None)
def no_batch_at_all(p: Any, b: Any) -> Tensor:
    assert b is None
    return sum(w.square().sum() for w in p.values())  # pyright: ignore


FEW = {"capture": zfunc.Capture("auto", max_shape_misses=2)}


@case(mlp, tokens, steps=4, rung="dynamic autograd", worlds=(1, 2, 3), options=FEW)
def lengths_that_never_end(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()
