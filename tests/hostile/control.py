"""Control flow: what a rank uses, and how often, differs from rank to rank and step to step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.hostile.case import case, ints
from tests.hostile.trees import forward, mlp, rows

DYNAMIC = "dynamic autograd"


def _times(rank: int, step: int) -> Any:
    return {"x": ints(rank + step, 2, 4), "n": (rank + step) % 3}


@case(lambda rank: {"w": ints(1, 4, 4), "s": ints(2, 4)}, _times)
def used_n_times_with_n_of_the_rank_and_step(p: Any, b: Any) -> Tensor:
    h = b["x"]
    for _ in range(b["n"]):
        h = torch.relu(h @ p["w"] + p["s"]).clamp(max=4)
    return h.square().sum()


@case(mlp, lambda rank, step: {"x": ints(rank, 2, 4), "on": rank == 1})
def used_on_some_ranks_only(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum() if b["on"] else (b["x"] @ p["a"]).sum()


@case(mlp, lambda rank, step: {"x": ints(rank, 2, 4), "on": rank != 0})
def a_rank_that_uses_nothing(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum() if b["on"] else b["x"].sum()


@case(mlp, lambda rank, step: {"x": ints(rank, 2, 4), "up": rank % 2 == 0})
def used_in_another_order_on_every_rank(p: Any, b: Any) -> Tensor:
    h = b["x"].sum()
    for name in sorted(p, reverse=b["up"]):
        h = (p[name] * h.clamp(-3, 3)).sum()
    return h


@case(mlp, lambda rank, step: {"x": ints(rank, 2, 4), "branch": "ab"[step % 2]}, steps=4)
def a_branch_that_alternates(p: Any, b: Any) -> Tensor:
    if b["branch"] == "a":
        return forward(p, b["x"]).square().sum()
    return (b["x"] @ p["a"] - p["b"]).square().sum()


def _experts(rank: int) -> Any:
    return {"router": ints(1, 4, 3), "experts": [{"w": ints(n, 4, 4)} for n in range(3)]}


@case(_experts, rows, rung=DYNAMIC, options={"capture": "auto"})
def experts_chosen_in_python(p: Any, b: Any) -> Tensor:
    total = b["x"].new_zeros(())
    for row in b["x"]:
        scores = row @ p["router"]
        best = int(scores.argmax())
        total = total + (torch.relu(row @ p["experts"][best]["w"]) * scores[best]).sum()
    return total


def _routed(rank: int, step: int) -> Any:
    return {"x": ints(rank + step, 3, 4), "route": tuple((rank + step * k) % 3 for k in range(3))}


@case(_experts, _routed)
def experts_chosen_by_the_batch(p: Any, b: Any) -> Tensor:
    scores = b["x"] @ p["router"]
    total = scores.sum()
    for n, expert in enumerate(b["route"]):
        h = torch.relu(b["x"][n] @ p["experts"][expert]["w"])
        total = total + (h * scores[n, expert]).sum()
    return total


@case(_experts, rows)
def experts_chosen_by_masks(p: Any, b: Any) -> Tensor:
    scores = b["x"] @ p["router"]
    best = scores.argmax(-1)
    outs = torch.stack([torch.relu(b["x"] @ e["w"]) for e in p["experts"]], 1)
    picked = outs.gather(1, best[:, None, None].expand(-1, 1, 4))[:, 0]
    return (picked * scores.gather(1, best[:, None])).sum()


@case(mlp, rows, rung=DYNAMIC)
def a_loop_that_ends_on_a_value(p: Any, b: Any) -> Tensor:
    h, n = b["x"] @ p["a"], 0
    while h.abs().sum().item() < 50 and n < 4:
        h, n = h * 2 + p["b"], n + 1
    return h.sum()


def _some_dynamic(rank: int, step: int) -> Any:
    return {"x": ints(rank + step, 2, 4), "look": rank == 0}


@case(mlp, rows, rung=DYNAMIC)
def boolean_indexing(p: Any, b: Any) -> Tensor:
    h = b["x"] @ p["a"]
    return h[h > 0].square().sum() + p["b"].sum()


@case(mlp, rows, rung=DYNAMIC, options={"capture": "dynamic", "has_aux": True})
def the_dynamic_rung_by_choice(p: Any, b: Any) -> Any:
    h = forward(p, b["x"])
    return h.square().sum(), {"largest": h.max().item(), "h": h.t()}


@case(mlp, rows)
def gradients_that_are_zero(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum() * 0 + p["a"].detach().sum()
