"""The native collectives of the GPU path, run over gloo, which offers the same calls."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ranks import spawn_ranks
from tests.test_comm import (
    CASES,
    many_in_flight,
    same,
)
from tests.test_comm_start import free_port, launched
from zfunc.comm.blame import Watch
from zfunc.comm.control import Control
from zfunc.comm.nccl import nccl_comm
from zfunc.meshes import Mesh

AXES = {"replica": 2, "shard": 2}
SIZES = [1, 0, 2, 5, 12, 1001]
DTYPES = [torch.float32, torch.int64, torch.complex64]


class NoLink:
    """A control group that has nobody to talk to."""


def native(pool_mesh, port):
    rank, world = pool_mesh.rank, pool_mesh.size
    launched(rank, world, port)
    dist.init_process_group("gloo")
    results = []
    for axes in ({"shard": world}, AXES):
        control = Control(NoLink(), rank, 1, Watch(dist.HashStore(), rank, 1.0))
        comm = nccl_comm(axes, rank, control=control, timeout_s=20, backend="gloo")
        mesh = Mesh(axes, rank, tuple(range(world)), comm=comm)
        for axis in axes:
            for dtype in DTYPES:
                results.append([fn(mesh, axis, SIZES, dtype) for fn, _ in CASES])
    flat = Mesh({"shard": world}, rank, tuple(range(world)))
    comm = nccl_comm(flat.axes, rank, control=control, timeout_s=20, backend="gloo")
    flat = Mesh(flat.axes, rank, flat.processes, comm=comm)
    many_in_flight(flat, 0, 9)
    calls = comm.stats().messages
    comm.gather("shard", [torch.zeros(1)] * 50, [torch.zeros(world)] * 50)
    comm.drain()
    calls = comm.stats().messages - calls
    dist.destroy_process_group()
    return results, calls


def test_native_collectives_equal_stacked_algebra():
    with spawn_ranks(4, native, free_port(), mesh_timeout_s=20) as ranks:
        outcomes = ranks.outcomes(4, timeout_s=100)
    for rank, outcome in enumerate(outcomes):
        assert not outcome.text, outcome.text
        results, calls = outcome.value
        assert calls == 1
        wanted = iter(results)
        for axes in ({"shard": 4}, AXES):
            for axis in axes:
                for dtype in DTYPES:
                    per_case = next(wanted)
                    for (_, oracle), tensors in zip(CASES, per_case, strict=True):
                        for numel, result in zip(SIZES, tensors, strict=True):
                            assert same(result, oracle(axes, rank, axis, numel, dtype))
