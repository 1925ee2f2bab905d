"""Measured rates are alike on every rank, and plausible."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest

from tests.ranks import run_ranks
from zfunc import hardware as measure
from zfunc.comm import local_mesh
from zfunc.errors import LayoutError
from zfunc.hardware import measure_hardware
from zfunc.meshes import Hardware, Mesh, abstract_mesh


def measured(mesh):
    better = mesh.measure()
    assert better == mesh
    return better.hw


@pytest.mark.parametrize(
    "run", [lambda: local_mesh(2).run(measured), lambda: run_ranks(2, measured)]
)
def test_every_rank_has_the_same_rates(run):
    first, second = run()
    assert first == second
    for field in dataclasses.fields(Hardware):
        assert getattr(first, field.name) > 0
    assert first != Hardware()
    # Between a very slow machine and one that does not exist.
    assert 1e8 < first.flops_per_s < 1e15
    assert 1e7 < first.memory_bytes_per_s < 1e13
    assert 1e6 < first.network_bytes_per_s < 1e12
    assert 1e-7 < first.message_s < 1.0


def disagreeing(mesh):
    rank = mesh.rank
    own = {
        "_flops": lambda device: 100.0 + rank,
        "_memory": lambda device: 200.0 - rank,
        "_network": lambda mesh, comm: (300.0 + rank, 0.5 + rank),
        "_room": lambda device, neighbours: 400 * neighbours - rank,
    }
    with mock.patch.multiple(measure, **own):
        return measure_hardware(mesh)


def test_the_slowest_rank_counts():
    agreed = Hardware(100.0, 198.0, 300.0, 2.5, 1198)
    assert run_ranks(3, disagreeing) == [agreed] * 3


def test_one_rank_keeps_the_networks_figures():
    hw = Hardware(network_bytes_per_s=12.0, message_s=3.0)
    alone = measure_hardware(Mesh({"shard": 1}, processes=(0,), hw=hw))
    assert (alone.network_bytes_per_s, alone.message_s) == (12.0, 3.0)


def test_an_abstract_mesh_cannot_be_measured():
    with pytest.raises(LayoutError, match="nothing to measure"):
        abstract_mesh({"shard": 8}).measure()
