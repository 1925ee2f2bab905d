"""Meshes that talk: real ranks over torch.distributed, virtual ranks in this process.

`mesh` and `local_mesh` build a `zfunc.meshes.Mesh` with a communicator behind it. Everything above
this package sees only the `Comm` protocol, so a program runs alike on both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from zfunc.comm.groups import single_axis
from zfunc.comm.local import LocalMesh
from zfunc.comm.pieces import CommStats
from zfunc.comm.start import choose_device, connect, launched_size, start_process_group
from zfunc.errors import LayoutError, explain
from zfunc.meshes import Mesh, check_axes

__all__ = ["CommStats", "LocalMesh", "as_mesh", "local_mesh", "mesh"]


def mesh(
    axes: Mapping[str, int] | None = None,
    *,
    device: str | torch.device | None = None,
    timeout_s: float = 60.0,
) -> Mesh:
    """Makes the mesh of all processes that the launcher started.

    Starts torch's process group if there is none. A single process needs no launcher and gets none.

    Args:
        axes: name -> size, the last axis varying fastest over ranks; None for one axis `"shard"`.
        device: where this rank computes; None for its GPU if there is one, else the CPU.
        timeout_s: the bound of every wait for another rank; a rank that is gone for longer is lost.

    Returns:
        The mesh as this rank sees it.

    Raises:
        LayoutError: the sizes do not multiply to the number of processes.
        RankLostError: a process did not come within `timeout_s`.

    Example:
        >>> mesh().axes  # in one process, without a launcher
        {'shard': 1}
    """
    size = launched_size()
    sizes = {"shard": size} if axes is None else dict(axes)
    check_axes(sizes)
    where = choose_device(device)
    if size == 1:
        return connect(sizes, (0,), 0, device=where, timeout_s=timeout_s)
    start_process_group(where, timeout_s)
    processes = tuple(range(size))
    return connect(
        sizes, processes, torch.distributed.get_rank(), device=where, timeout_s=timeout_s
    )


def as_mesh(mesh: Mesh | DeviceMesh, *, timeout_s: float = 60.0) -> Mesh:
    """Turns torch's `DeviceMesh` into a mesh; a mesh stays as it is.

    Every process of the device mesh must call, in the same order among its meshes.

    Args:
        mesh: a mesh, or a device mesh, which may cover a part of the processes.
        timeout_s: the bound of every wait for another rank.

    Returns:
        A mesh with the names and sizes of the device mesh; one dim without a name becomes the axis
        `"shard"`.

    Raises:
        LayoutError: several dims without names, or this process is not in the device mesh.
        RankLostError: a process did not come within `timeout_s`.
    """
    if isinstance(mesh, Mesh):
        return mesh
    names = mesh.mesh_dim_names or (("shard",) if mesh.ndim == 1 else ())
    if len(names) != mesh.ndim:
        raise LayoutError(
            explain(
                "a device mesh of several dims has no names for them",
                expected="mesh_dim_names",
                got=f"shape {tuple(mesh.mesh.shape)}",
                do="pass mesh_dim_names=(...) to init_device_mesh",
            )
        )
    axes = dict(zip(names, mesh.mesh.shape, strict=True))
    processes = tuple(mesh.mesh.flatten().tolist())
    device = choose_device("cpu" if mesh.device_type == "cpu" else None)
    return connect(
        axes, processes, torch.distributed.get_rank(), device=device, timeout_s=timeout_s
    )


def local_mesh(n_or_axes: int | Mapping[str, int]) -> LocalMesh:
    """Makes virtual ranks in this process.

    Args:
        n_or_axes: the number of ranks, or name -> size.

    Returns:
        A `LocalMesh`, whose `run` calls a function once per rank.

    Raises:
        LayoutError: no axis, or a size below 1.

    Example:
        >>> local_mesh(3).run(lambda mesh: mesh.rank)
        [0, 1, 2]
    """
    return LocalMesh(single_axis(n_or_axes))
