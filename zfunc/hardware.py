"""Hardware: the rates that the cost model reads, given or measured, alike on every rank.

To measure, each rank times a matrix product, a copy, a large and a tiny gather. The slowest rank's
figures are taken everywhere: plans depend on them, and every rank must plan alike.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zfunc.errors import LayoutError, explain

if TYPE_CHECKING:
    from zfunc.meshes import Comm, Mesh

__all__ = ["Hardware", "measure_hardware"]

_MATRIX = 512
_COPY_BYTES = 32 << 20
_GATHER_BYTES = 16 << 20
_REPEATS = 5
_FRAME = struct.Struct("<5d")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """Rates that the cost model reads; they move issue slots only, never results.

    The defaults describe one CPU process with a loopback network.

    Attributes:
        flops_per_s: sustained rate of matrix products.
        memory_bytes_per_s: rate of main (device) memory.
        network_bytes_per_s: rate of one rank's link, each way.
        message_s: fixed cost of one message.
        device_bytes: memory of one rank.
    """

    flops_per_s: float = 60e9
    memory_bytes_per_s: float = 16e9
    network_bytes_per_s: float = 1.6e9
    message_s: float = 30e-6
    device_bytes: int = 8_000_000_000

    @classmethod
    def h100_ib(cls) -> Hardware:
        """One H100 with 400 Gbit/s InfiniBand (vendor figures, not measured)."""
        return cls(
            flops_per_s=400e12,
            memory_bytes_per_s=3.35e12,
            network_bytes_per_s=50e9,
            message_s=20e-6,
            device_bytes=80_000_000_000,
        )


def measure_hardware(mesh: Mesh) -> Hardware:
    """Times this mesh and agrees on its rates; every rank must call. Takes about a second.

    Args:
        mesh: a mesh that is not abstract. On a mesh of one rank the network's figures stay those of
            `mesh.hw`.

    Returns:
        The same rates on every rank: each that of the slowest.

    Raises:
        LayoutError: the mesh is abstract.
        RankLostError: a rank did not take part.
    """
    if mesh.is_abstract:
        raise LayoutError(
            explain(
                "an abstract mesh has nothing to measure",
                expected="a mesh of running ranks",
                got=str(mesh),
                do="pass hw=Hardware(...) to abstract_mesh",
            )
        )
    comm = mesh.comm
    neighbours = 1 if comm is None else comm.exchange(_host()).count(_host())
    network, message = (mesh.hw.network_bytes_per_s, mesh.hw.message_s)
    if comm is not None:
        network, message = _network(mesh, comm)
    mine = _FRAME.pack(
        _flops(mesh.device), _memory(mesh.device), network, -message, _room(mesh.device, neighbours)
    )
    everyone = [mine] if comm is None else comm.exchange(mine)
    slowest = [min(column) for column in zip(*map(_FRAME.unpack, everyone), strict=True)]
    return Hardware(
        flops_per_s=slowest[0],
        memory_bytes_per_s=slowest[1],
        network_bytes_per_s=slowest[2],
        message_s=-slowest[3],
        device_bytes=int(slowest[4]),
    )


def _flops(device: torch.device) -> float:
    left, right = torch.ones(2, _MATRIX, _MATRIX, device=device)
    return 2 * _MATRIX**3 / _time(lambda: torch.mm(left, right), device)


def _memory(device: torch.device) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * _COPY_BYTES / _time(lambda: target.copy_(source), device)


def _network(mesh: Mesh, comm: Comm) -> tuple[float, float]:
    """Rate of one link each way, and the cost of one message, over the longest axis."""
    axis = max(mesh.axes, key=lambda name: mesh.axes[name])
    size, index = mesh.axes[axis], mesh.index(axis)

    def gather_s(nbytes: int) -> float:
        piece = nbytes // size
        full = torch.zeros(piece * size, dtype=torch.uint8, device=mesh.device)
        shard = full[index * piece : (index + 1) * piece].clone()
        comm.exchange(b"")
        return _time(lambda: comm.gather(axis, [shard], [full]).wait(), mesh.device)

    message = gather_s(size) / (size - 1)
    received = _GATHER_BYTES * (size - 1) / size
    return received / gather_s(_GATHER_BYTES), message


def _time(work: Callable[[], object], device: torch.device) -> float:
    """The median seconds of a few runs, after one to warm up."""
    taken = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _room(device: torch.device, neighbours: int) -> float:
    """The memory of one rank: a GPU's own, or an equal part of what its host lets it have."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return min(total, int(limit) if limit.isdigit() else total) / neighbours


def _host() -> bytes:
    return socket.gethostname().encode()
