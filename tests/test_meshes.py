"""Meshes as values: axes, places along them, ranges, equality."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zfunc.comm.groups import axis_groups
from zfunc.errors import LayoutError
from zfunc.meshes import Hardware, Mesh, abstract_mesh, chunk_numel, shard_range

axes_of_any_size = st.dictionaries(
    st.sampled_from(["pipe", "replica", "shard", "tensor"]), st.integers(1, 4), min_size=1
)


def test_an_abstract_mesh_has_names_and_sizes_only():
    mesh = abstract_mesh({"replica": 2, "shard": 4})
    assert (mesh.size, mesh.rank, mesh.comm, mesh.is_abstract) == (8, 0, None, True)
    assert str(mesh) == "mesh[replica:2 shard:4]"
    assert mesh.axis_size("shard") == 4
    assert abstract_mesh({"shard": 2}, hw=Hardware.h100_ib()).hw.device_bytes == 80_000_000_000


@pytest.mark.parametrize("axes", [{}, {"shard": 0}, {"a": 2, "b": -1}, {"shard": 1.5}])
def test_axes_that_describe_no_mesh_are_refused(axes):
    with pytest.raises(LayoutError, match="do not describe a mesh"):
        abstract_mesh(axes)


def test_an_unknown_axis_is_an_error_that_names_the_known_ones():
    mesh = abstract_mesh({"replica": 2, "shard": 4})
    for ask in (mesh.index, mesh.axis_size):
        with pytest.raises(LayoutError, match=r"expected  one of \('replica', 'shard'\)"):
            ask("sharp")


@given(axes_of_any_size)
def test_the_last_axis_varies_fastest(axes):
    coordinates = list(itertools.product(*(range(size) for size in axes.values())))
    for rank, place in enumerate(coordinates):
        mesh = Mesh(axes, rank, tuple(range(len(coordinates))))
        assert tuple(mesh.index(axis) for axis in axes) == place


@given(axes_of_any_size)
def test_the_group_of_an_axis_differs_in_that_axis_alone(axes):
    coordinates = list(itertools.product(*(range(size) for size in axes.values())))
    for rank, place in enumerate(coordinates):
        for dim, (axis, group) in enumerate(axis_groups(axes, rank).items()):
            wanted = [
                other
                for other, there in enumerate(coordinates)
                if all(there[d] == place[d] for d in range(len(axes)) if d != dim)
            ]
            assert (group.axis, list(group.ranks), group.index) == (axis, wanted, place[dim])
            assert sorted([*group.peers, group.index]) == list(range(group.size))


@given(numel=st.integers(0, 40), size=st.integers(1, 9))
def test_ranges_cut_a_tensor_without_gap_or_overlap(numel, size):
    ranges = [shard_range(numel, size, index) for index in range(size)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(numel))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) == chunk_numel(numel, size) == math.ceil(numel / size)
    assert lengths == sorted(lengths, reverse=True)


def test_equality_is_by_axes_sizes_and_processes():
    mesh = Mesh({"a": 2, "b": 2}, 0, (0, 1, 2, 3))
    same = Mesh({"a": 2, "b": 2}, 3, (0, 1, 2, 3), torch.device("meta"), Hardware.h100_ib())
    assert mesh == same
    assert hash(mesh) == hash(same)
    for other in (
        Mesh({"b": 2, "a": 2}, 0, (0, 1, 2, 3)),
        Mesh({"a": 4, "b": 1}, 0, (0, 1, 2, 3)),
        Mesh({"a": 2, "b": 2}, 0, (4, 5, 6, 7)),
        abstract_mesh({"a": 2, "b": 2}),
        "mesh",
    ):
        assert mesh != other
