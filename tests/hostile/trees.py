"""Trees of every form: containers, statics, ties, and leaves that nobody would expect."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hostile.case import case, ints
from zfunc import tree


def rows(rank: int, step: int) -> dict[str, Any]:
    """Two or three rows of four numbers."""
    seed = 100 * step + rank
    return {"x": ints(seed, 2 + rank % 2, 4), "index": ints(seed, 3).abs().long()}


# A graph of thousands of nodes is traced once on each of two ranks, and not checked pass by pass.
ONCE: dict[str, Any] = {
    "worlds": (2,),
    "steps": 1,
    "checked": False,
    "options": {"capture": "auto"},
}


def mlp(rank: int = 0) -> dict[str, Any]:
    return {"a": ints(1, 4, 3), "b": ints(2, 3), "c": ints(3, 3, 4)}


def forward(p: Any, x: Tensor) -> Tensor:
    return torch.relu(x @ p["a"] + p["b"]) @ p["c"]


@case(lambda rank: {"embed": ints(1, 5, 3), "w": ints(2, 3, 3)}, rows)
def tied_weights_as_one_leaf(p: Any, b: Any) -> Tensor:
    h = torch.relu(F.embedding(b["index"], p["embed"]) @ p["w"])
    return (h @ p["embed"].t()).square().sum()


def _twice(rank: int) -> Any:
    w = ints(1, 4, 4)
    return {"a": w, "b": [w, w]}


@case(_twice, rows)
def same_tensor_at_two_paths(p: Any, b: Any) -> Tensor:
    return (torch.relu(b["x"] @ p["a"]) @ p["b"][1]).square().sum()


@case(lambda rank: ints(1, 4, 3), rows)
def bare_tensor_as_the_tree(p: Any, b: Any) -> Tensor:
    return (b["x"] @ p).square().sum()


class Pair(NamedTuple):
    left: Any
    right: Any


@case(lambda rank: Pair(ints(1, 4, 3), Pair(ints(2, 3), [ints(3, 3, 4)])), rows)
def named_tuple(p: Any, b: Any) -> Tensor:
    h = b["x"] @ p.left + p.right.left
    return (h @ p.right.right[0]).square().sum()


@case(lambda rank: OrderedDict([("z", ints(1, 4, 3)), ("a", ints(2, 3))]), rows)
def ordered_dict(p: Any, b: Any) -> Tensor:
    assert list(p) == ["z", "a"]
    return (b["x"] @ p["z"] + p["a"]).square().sum()


@case(lambda rank: {10: ints(1, 4, 3), 9: ints(2, 3), -1: {2: ints(4, 3)}}, rows)
def int_keys(p: Any, b: Any) -> Tensor:
    return (b["x"] @ p[10] + p[9] - p[-1][2]).square().sum()


@case(lambda rank: {0: ints(1, 4, 3), "b": ints(2, 3), (1, 2): ints(3, 3)}, rows)
def keys_that_do_not_compare(p: Any, b: Any) -> Tensor:
    return (b["x"] @ p[0] + p["b"] - p[1, 2]).square().sum()


@dataclasses.dataclass
class Layer:
    w: Tensor
    b: Tensor
    name: str = "layer"


tree.register_node(
    Layer, lambda x: ((x.w, x.b), x.name, ("w", "b")), lambda name, kids: Layer(*kids, name)
)


@case(
    lambda rank: [Layer(ints(1, 4, 4), ints(2, 4)), Layer(ints(3, 4, 4), ints(4, 4), "last")], rows
)
def registered_dataclass(p: Any, b: Any) -> Tensor:
    h = b["x"]
    for layer in p:
        h = h @ layer.w + (layer.b if layer.name == "last" else -layer.b)
    return h.square().sum()


def _shuffled(rank: int) -> Any:
    items = list(mlp().items())
    return dict(items[rank % 3 :] + items[: rank % 3])


def _shuffled_rows(rank: int, step: int) -> Any:
    items = list(rows(rank, step).items())
    return dict(items[::-1] if (rank + step) % 2 else items)


@case(_shuffled, _shuffled_rows)
def dict_order_differs_per_rank(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum() + b["index"].sum()


def _anything(rank: int) -> Any:
    return {
        "w": ints(1, 4, 3),
        "index": torch.tensor([2, 0, 1]),
        "mask": torch.tensor([True, False, True]),
        "codes": torch.tensor([1, 0, 3], dtype=torch.uint8),
        "none": None,
        "name": "relu",
        "scale": 0.5,
        "times": 2,
        "f": torch.relu,
        "empty": [],
        "on": True,
    }


@case(_anything, rows)
def leaves_that_are_no_floats(p: Any, b: Any) -> Tensor:
    assert p["none"] is None and p["empty"] == [] and p["on"] is True
    h = p["f"](b["x"] @ p["w"])[:, p["index"]] * p["mask"] + p["codes"]
    return getattr(torch, p["name"])(h * p["scale"]).square().sum() * p["times"]


def _empty(rank: int) -> Any:
    return {
        "first": torch.zeros(0).double(),
        "middle": {"a": ints(1, 4, 3), "none": torch.zeros(4, 0, 2).double(), "z": ints(2, 3)},
        "most last": torch.zeros(3, 0).double(),
    }


@case(_empty, rows)
def leaves_of_no_elements(p: Any, b: Any) -> Tensor:
    h = b["x"] @ p["middle"]["a"] + p["middle"]["z"]
    nothing = p["first"].sum() + p["middle"]["none"].sum() + (h @ p["most last"]).sum()
    return (h + nothing).square().sum()


@case(lambda rank: torch.zeros(0, 3).double(), rows)
def a_leaf_of_no_elements_alone(p: Any, b: Any) -> Tensor:
    return b["x"].sum() + p.sum()


@case(lambda rank: {"z": ints(1), "a": [ints(2), {"m": ints(3, 4, 2)}, ints(4)]}, rows)
def leaves_of_no_dims(p: Any, b: Any) -> Tensor:
    first, inner, last = p["a"]
    return ((b["x"] @ inner["m"] + first) * last - p["z"]).square().sum()


@case(lambda rank: ints(7), rows)
def a_leaf_of_no_dims_alone(p: Any, b: Any) -> Tensor:
    return (b["x"] * p - 1).square().sum()


def _primes(rank: int) -> Any:
    return [ints(n, n) for n in (1, 2, 3, 5, 7, 11, 13, 17)]


@case(_primes, rows)
def sizes_that_are_prime(p: Any, b: Any) -> Tensor:
    total = b["x"].sum()
    for leaf in p:
        total = total + (leaf * leaf.numel()).square().sum() * b["x"][0, 0]
    return total


@case(lambda rank: {"one": ints(3, 1), "two": ints(4, 2), "three": ints(5, 1, 3)}, rows)
def more_ranks_than_elements(p: Any, b: Any) -> Tensor:
    return (b["x"][:, :2] * p["two"] + p["one"]).square().sum() * p["three"].square().sum()


@case(lambda rank: [ints(n, n % 3 + 1) for n in range(1000)], rows, **ONCE)
def a_thousand_tiny_leaves(p: Any, b: Any) -> Tensor:
    return torch.cat(p).square().sum() * b["x"].sum() + p[7].sum()


@case(lambda rank: {"big": ints(1, 60, 60), "a": ints(2, 4, 60), "z": ints(3, 60)}, rows)
def one_leaf_larger_than_all_the_rest(p: Any, b: Any) -> Tensor:
    h = torch.relu(b["x"] @ p["a"]) @ p["big"] + p["z"]
    return (h @ p["big"].t()).sum()


@case(lambda rank: mlp() | {"unused": {"w": ints(5, 3, 3), "s": ints(6)}}, rows)
def a_leaf_never_used(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()


@case(mlp, rows)
def a_loss_that_ignores_its_parameters(p: Any, b: Any) -> Tensor:
    return b["x"].square().sum()
