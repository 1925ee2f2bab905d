"""Layouts: pieces tile a leaf, specs resolve per leaf, and what does not fit is named."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zfunc import tree
from zfunc.errors import LayoutError, TreeMismatchError
from zfunc.layout import DEVICE, Flat, Layout, P, ShapeDtype, layouts_of, zero
from zfunc.meshes import Mesh, abstract_mesh, chunk_numel, shard_range

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
AXES = st.dictionaries(
    st.sampled_from(["replica", "shard", "tensor"]), st.integers(1, 4), min_size=1
)
HSDP = {"replica": 2, "shard": 4}


def views(axes: dict[str, int]) -> list[Mesh]:
    """The mesh as each rank sees it."""
    size = math.prod(axes.values())
    return [Mesh(axes, rank=rank, processes=tuple(range(size))) for rank in range(size)]


def resolve(specs: Any, params: Any, axes: dict[str, int] | None = None) -> Any:
    """The layouts of a tree of tensors."""
    shapes = [tuple(x.shape) for x in tree.leaves(params)]
    mesh = abstract_mesh(axes or {"shard": 4})
    return layouts_of(specs, params, shapes, tree.leaf_paths(params), mesh)


@given(st.integers(0, 60), st.integers(1, 9))
def test_pieces_tile_a_leaf(numel: int, size: int):
    ranges = [shard_range(numel, size, index) for index in range(size)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(numel))
    assert all(stop - start <= chunk_numel(numel, size) for start, stop in ranges)
    assert chunk_numel(numel, size) * size < numel + size


@given(SHAPES, AXES, st.data())
def test_flat_pieces_along_an_axis_are_the_leaf(shape: Any, axes: dict[str, int], data: Any):
    axis = data.draw(st.sampled_from(sorted(axes)))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    groups: dict[Any, list[torch.Tensor]] = {}
    for mesh in views(axes):
        layout = Layout(shape, Flat(axis), mesh)
        start, stop = layout.range
        piece = whole.reshape(-1)[start:stop]
        assert piece.shape == layout.local_shape
        others = tuple(mesh.index(name) for name in axes if name != axis)
        groups.setdefault(others, []).append(piece)
    assert len(groups) == math.prod(axes.values()) // axes[axis]
    for pieces in groups.values():
        assert torch.equal(torch.cat(pieces).reshape(shape), whole)


@given(AXES)
def test_the_last_axis_varies_fastest(axes: dict[str, int]):
    grid = torch.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    for mesh in views(axes):
        assert int(grid[tuple(mesh.index(name) for name in axes)]) == mesh.rank


@given(SHAPES)
def test_whole_leaves_are_whole_everywhere(shape: Any):
    for mesh in views({"shard": 3}):
        layout = Layout(shape, P(), mesh)
        assert (layout.local_shape, layout.range) == (shape, (0, math.prod(shape)))
        assert layout.axis is None


def test_layouts_compare_by_shape_spec_and_mesh():
    first, second = views({"shard": 2})
    layout = Layout((4,), Flat(), first, "params['a']")
    same = Layout((4,), Flat(), second, "params['b']")
    assert layout == same
    assert hash(layout) == hash(same)
    for other in (
        Layout((5,), Flat(), first),
        Layout((4,), P(), first),
        Layout((4,), Flat(), abstract_mesh({"shard": 2})),
        Layout((4,), Flat(), Mesh({"shard": 2}, processes=(1, 2))),
        Layout((4,), Flat(), Mesh({"replica": 2}, processes=(0, 1))),
    ):
        assert layout != other


@pytest.mark.parametrize(
    "value",
    [
        Flat(),
        Flat("replica", min_numel=3),
        P(),
        P("shard", None),
        ShapeDtype((2, 3), torch.bfloat16),
        Layout((2, 3), Flat(), Mesh({"shard": 2}, rank=1, processes=(0, 1)), "params"),
    ],
    ids=str,
)
def test_values_pickle_and_hash(value: Any):
    again = pickle.loads(pickle.dumps(value))
    assert again == value
    assert hash(again) == hash(value)


def test_specs_print_as_typed():
    for spec in (Flat(), Flat("x", 5), P(), P("x"), P(None, "x")):
        assert eval(repr(spec)) == spec
    assert repr(DEVICE) == "DEVICE"


def test_specs_are_leaves_of_a_tree():
    assert tree.leaves({"a": P("x"), "b": Flat()}) == [P("x"), Flat()]


def test_shape_dtype_counts_bytes():
    assert ShapeDtype((3, 5), torch.bfloat16).nbytes == 30
    assert ShapeDtype((), torch.float64).nbytes == 8
    assert ShapeDtype((4, 0), torch.float32).nbytes == 0


@pytest.mark.parametrize(
    ("stage", "axes"),
    [(1, (None, None, "shard")), (2, (None, "shard", "shard")), (3, ("shard", "shard", "shard"))],
)
def test_stages(stage: int, axes: Any):
    params = {"a": torch.zeros(3, 2), "b": torch.zeros(())}
    for row in resolve(zero(stage), params):
        assert (row.params.axis, row.grads.axis, row.opt.axis) == axes
    for row in resolve(zero(stage, "replica"), params, HSDP):
        renamed = tuple("replica" if axis else None for axis in axes)
        assert (row.params.axis, row.grads.axis, row.opt.axis) == renamed


def test_unknown_stages_are_refused():
    with pytest.raises(LayoutError, match="zero\\(0\\)"):
        zero(0)


def test_one_spec_stands_for_all_classes_and_leaves():
    params = {"a": torch.zeros(3, 2), "b": [torch.zeros(5)]}
    rows = resolve(Flat(), params)
    assert [row.params.path for row in rows] == ["params['a']", "params['b'][0]"]
    for row in rows:
        assert row.params == row.grads == row.opt
        assert row.params.spec == Flat()


def test_missing_classes_follow_params():
    (row,) = resolve({"params": P(), "opt": Flat()}, {"a": torch.zeros(4)})
    assert (row.params.spec, row.grads.spec, row.opt.spec) == (P(), P(), Flat())


def test_prefix_trees_of_specs():
    params = {"body": [torch.zeros(4), torch.zeros(4)], "head": torch.zeros(4)}
    rows = resolve({"body": Flat(), "head": P()}, params)
    assert [row.params.spec for row in rows] == [Flat(), Flat(), P()]
    rows = resolve({"params": P(), "opt": {"body": Flat(), "head": P()}}, params)
    assert [row.opt.spec for row in rows] == [Flat(), Flat(), P()]


def test_small_leaves_stay_whole():
    params = {"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": torch.zeros(())}
    rows = resolve(Flat(min_numel=4), params)
    assert [row.params.spec for row in rows] == [P(), Flat(min_numel=4), P()]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (Flat("shrd"), r"(?s)names an axis.*did you mean 'shard'\?"),
        (Flat("other"), r"(?s)names an axis.*'other' for params\['w'\]: \[2, 3\]"),
        (
            P("shard"),
            r"(?s)specs\['params'\] has P\('shard'\) for params\['w'\].*Flat\(axis\) or P",
        ),
        ({"opt": Flat()}, r"lack 'params'"),
        ({"params": Flat(), "grads": P()}, r"(?s)params\['w'\] do not nest.*grads P\(\)"),
        ({"params": Flat(), "opt": P()}, r"params\['w'\] do not nest"),
        ({"params": P(), "grads": Flat(), "opt": P()}, r"params\['w'\] do not nest"),
        ({"params": Flat(), "opt": Flat("replica")}, r"params\['w'\] do not nest"),
        ("shard", r"has 'shard' for params\['w'\]"),
    ],
)
def test_specs_that_do_not_fit_are_refused(specs: Any, message: str):
    with pytest.raises(LayoutError, match=message):
        resolve(specs, {"w": torch.zeros(2, 3)}, HSDP)


def test_a_tree_of_specs_must_be_a_prefix():
    with pytest.raises(TreeMismatchError, match=r"specs\['params'\]"):
        resolve({"v": Flat()}, {"w": torch.zeros(2)})


@pytest.mark.parametrize("axes", [{}, {"shard": 0}, {"shard": 2.0}])
def test_meshes_need_axes_of_at_least_one_rank(axes: Any):
    with pytest.raises(LayoutError, match="do not describe a mesh"):
        abstract_mesh(axes)


def test_meshes_compare_by_axes_and_processes():
    first, second = views({"shard": 2})
    assert first == second
    assert first != abstract_mesh({"shard": 2})
    assert abstract_mesh(HSDP) != abstract_mesh(dict(reversed(HSDP.items())))
    with pytest.raises(LayoutError, match="'tensor' is not an axis"):
        first.index("tensor")
