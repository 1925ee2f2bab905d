"""`Sharded` leaves: nodes with one child, refused as tensors, held on a lease."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
from torch.utils import _pytree as torch_pytree

from zfunc import tree
from zfunc.errors import DonatedStateError, LayoutError
from zfunc.layout import Flat, Layout, P
from zfunc.meshes import Mesh
from zfunc.sharded import Sharded, consume, is_sharded, whole

MESH = Mesh({"shard": 2}, rank=1, processes=(0, 1))


def make(numel: int = 3, name: str = "w") -> Sharded:
    """This rank's piece of a leaf of 4 elements or more."""
    layout = Layout((2 * numel,), Flat(), MESH, f"params['{name}']")
    return Sharded(torch.arange(numel, dtype=torch.float32), layout)


def test_maps_reach_the_local_tensor_and_keep_the_layout():
    leaf = make()
    (mapped,) = tree.map(lambda x: x + 1, [leaf])
    assert is_sharded(mapped)
    assert mapped.local.tolist() == [1, 2, 3]
    assert mapped.layout == leaf.layout
    assert mapped.layout.path == "params['w']"
    assert (mapped.shape, mapped.dtype) == ((6,), torch.float32)
    assert leaf.local.tolist() == [0, 1, 2]


def test_torch_maps_as_we_do():
    leaf = make()
    leaves, structure = torch_pytree.tree_flatten({"a": leaf})
    assert leaves[0] is leaf.local
    again = torch_pytree.tree_unflatten(leaves, structure)["a"]
    assert again.local is leaf.local
    assert again.layout == leaf.layout


def test_structures_differ_by_layout_and_by_nothing_else():
    leaf = make()
    other_rank = Sharded(torch.zeros(1), Layout((6,), Flat(), Mesh({"shard": 2}, 0, (0, 1)), "x"))
    assert tree.structure(leaf) == tree.structure(make()) == tree.structure(other_rank)
    assert tree.structure(leaf) != tree.structure(make(4))
    assert tree.structure(leaf) != tree.structure(whole(torch.zeros(6), leaf.layout))
    spent = make()
    structure = tree.structure(spent)
    consume(spent, "step 1")
    assert structure == tree.structure(leaf)


def test_whole_wraps_what_every_rank_holds():
    leaf = whole(torch.tensor(3), make().layout)
    assert (leaf.shape, leaf.dtype, leaf.layout.spec) == ((), torch.int64, P())
    assert leaf.layout.mesh == MESH


OPERATIONS: dict[str, Any] = {
    **{
        name: (lambda f: lambda x: f(x, 2))(getattr(operator, name))
        for name in ("add", "sub", "mul", "truediv", "matmul", "pow", "lt", "le", "gt", "ge")
    },
    **{
        f"r{name}": (lambda f: lambda x: f(2, x))(getattr(operator, name))
        for name in ("add", "sub", "mul", "truediv", "matmul", "pow")
    },
    "neg": operator.neg,
    "index": lambda x: x[0],
    "iterate": list,
    "float": float,
    "tensor + leaf": lambda x: torch.ones(3) + x,
    "leaf + tensor": lambda x: x + torch.ones(3),
    "tensor @ leaf": lambda x: torch.ones(3) @ x,
    "in place": lambda x: torch.ones(3).add_(x),
    "torch.exp": torch.exp,
    "torch.stack": lambda x: torch.stack([x, x]),
    "torch.where": lambda x: torch.where(torch.ones(3, dtype=torch.bool), x, 0.0),
    "linear": lambda x: torch.nn.functional.linear(torch.ones(3), x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_math_is_refused_with_the_path(name: str):
    with pytest.raises(LayoutError, match=r"^params\['w'\] entered tensor math"):
        OPERATIONS[name](make())


def test_a_consumed_leaf_cannot_be_read():
    leaf = make()
    taken = consume(leaf, "step 7")
    assert taken.data_ptr() == leaf._local.data_ptr()
    assert taken is not leaf._local
    for read in (lambda: leaf.local, lambda: tree.leaves(leaf), lambda: consume(leaf, "step 8")):
        with pytest.raises(DonatedStateError, match=r"(?s)^params\['w'\] was donated.*step 7"):
            read()
    assert "consumed by step 7" in repr(leaf)
    assert leaf.shape == (6,)


def test_the_lease_travels_with_the_tensor():
    """Whoever holds the same tensor shares the fate of its buffer, through any rebuilding."""
    leaf = make()
    same = tree.map(lambda x: x, {"a": leaf})["a"]
    leaves, structure = tree.flatten([leaf])
    rebuilt = tree.unflatten(structure, leaves)[0]
    shallow = copy.copy(leaf)
    view = tree.map(lambda x: x.detach()[1:], leaf)
    consume(leaf, "step 1")
    for holder in (same, rebuilt, shallow, view):
        with pytest.raises(DonatedStateError):
            _ = holder.local


def test_a_copy_of_a_leaf_that_nobody_has_asked_for_its_lease():
    leaf = make()
    shallow = copy.copy(leaf)
    consume(leaf, "step 1")
    with pytest.raises(DonatedStateError):
        _ = shallow.local


def test_pickles_hold_a_tensor_and_a_lease_of_its_own():
    leaf = make()
    assert leaf.lease.covers(leaf.local)
    again = pickle.loads(pickle.dumps(leaf))
    assert again.layout == leaf.layout
    consume(leaf, "step 1")
    assert again.local.tolist() == [0, 1, 2]
    with pytest.raises(DonatedStateError):
        pickle.dumps(leaf)


def test_another_tensor_starts_a_lease_of_its_own():
    leaf = make()
    mapped = tree.map(lambda x: x + 1, leaf)
    swapped = tree.unflatten(tree.structure(leaf), [torch.zeros(3)])
    deep = copy.deepcopy(leaf)
    consume(leaf, "step 1")
    assert mapped.local.tolist() == [1, 2, 3]
    assert swapped.local.tolist() == [0, 0, 0]
    assert deep.local.tolist() == [0, 1, 2]
    consume(mapped, "step 2")
    assert swapped.local.tolist() == [0, 0, 0]


def test_a_consumed_structure_does_not_taint_another_tensor():
    leaf = make()
    structure = tree.structure(leaf)
    consume(leaf, "step 1")
    fresh = tree.unflatten(structure, [torch.ones(3)])
    assert fresh.local.tolist() == [1, 1, 1]


def test_repr_says_what_the_leaf_is():
    assert repr(make()) == (
        "Sharded(float32[6], Flat(axis='shard', min_numel=0), mesh[shard:2], held)"
    )
