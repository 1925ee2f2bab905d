"""Connecting the ranks of a mesh.

The launcher's environment says who takes part. The gloo backends of a mesh belong to it alone and
are registered nowhere: only its ranks need to call, several meshes never share a connection, and a
fault of one leaves the user's own process group as it was.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from zfunc.comm.blame import Watch, as_lost
from zfunc.comm.compat import (
    PrefixStore,
    Store,
    default_store,
    gloo_backend,
    holds_store,
    rendezvous,
)
from zfunc.comm.control import Control
from zfunc.comm.dist import DistComm
from zfunc.errors import LayoutError, RankLostError, explain
from zfunc.meshes import Comm, Mesh, check_axes

__all__ = ["choose_device", "connect", "launched_size", "start_process_group"]


def launched_size() -> int:
    """The number of processes: of the running process group, else of the launcher, else 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device that was asked for, else this process's GPU, else the CPU."""
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def start_process_group(device: torch.device, timeout_s: float) -> None:
    """Starts torch's process group from the launcher's environment, if there is none.

    Raises:
        RankLostError: a process did not come within `timeout_s`.
    """
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    with as_lost("the start of the process group", timeout_s):
        store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
        _meet(PrefixStore("zfunc/start", store), range(world), rank, timeout_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def connect(
    axes: Mapping[str, int],
    processes: tuple[int, ...],
    process: int,
    *,
    device: torch.device,
    timeout_s: float,
    store: Store | None = None,
) -> Mesh:
    """Builds the mesh of some processes, as one of them sees it; each of them must call.

    Args:
        axes: name -> size, in all as many as there are processes.
        processes: the process of each mesh rank.
        process: this one.
        device: where this rank computes.
        timeout_s: the bound of every wait.
        store: where the ranks meet; None for that of torch's process group.

    Returns:
        A mesh with a communicator, or without one if it has a single rank.

    Raises:
        LayoutError: the axes do not fit the processes, or this process is none of them.
        RankLostError: a process did not come within `timeout_s`.
    """
    check_axes(axes)
    rank = _rank_among(axes, processes, process)
    if len(processes) == 1:
        return Mesh(dict(axes), rank, processes, device)
    name = "zfunc/" + "-".join(map(str, processes))
    store = default_store() if store is None else store
    shared = PrefixStore(name, store)
    # Every rank makes the meshes of these processes in one order: its own count names this one.
    count = shared.add(f"meshes/{rank}", 1)
    own = PrefixStore(str(count), shared)
    with as_lost(f"the start of the mesh of processes {processes}", timeout_s):
        if holds_store(store):
            own.set("holder", str(rank))
        _meet(own, range(len(processes)), rank, timeout_s)
        comm = _communicator(axes, rank, device, own, timeout_s)
    return Mesh(dict(axes), rank, processes, device, comm=comm)


def _communicator(
    axes: Mapping[str, int], rank: int, device: torch.device, store: Store, timeout_s: float
) -> Comm:
    size = math.prod(axes.values())
    holder = int(store.get("holder")) if store.check(["holder"]) else None
    watch = Watch(store, rank, timeout_s, holder)
    control = Control(
        gloo_backend(PrefixStore("control", store), rank, size, timeout_s), rank, size, watch
    )
    if device.type == "cuda":
        from zfunc.comm.nccl import nccl_comm

        return nccl_comm(axes, rank, control=control, timeout_s=timeout_s)
    data = gloo_backend(PrefixStore("data", store), rank, size, timeout_s)
    return DistComm(axes, rank, data=data, control=control, watch=watch)


def _rank_among(axes: Mapping[str, int], processes: tuple[int, ...], process: int) -> int:
    size = Mesh(dict(axes)).size
    if size != len(processes):
        raise LayoutError(
            explain(
                f"axes {dict(axes)} do not fit the processes that were launched",
                expected=f"sizes that multiply to {len(processes)}",
                got=size,
                do="change the axis sizes, or launch as many processes as they need",
            )
        )
    if process not in processes:
        raise LayoutError(
            explain(
                f"process {process} is not part of the mesh",
                expected=f"one of {processes}",
                got=process,
                do="make the mesh in its own processes only",
            )
        )
    return processes.index(process)


def _meet(store: Store, ranks: range, rank: int, timeout_s: float) -> None:
    """Waits until every rank is there, or says which are not."""
    store.set(f"here/{rank}", "")
    try:
        store.wait([f"here/{other}" for other in ranks], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [other for other in ranks if not store.check([f"here/{other}"])]
        raise RankLostError(
            explain(
                f"ranks {missing} did not come to the start of the mesh",
                expected=f"{len(ranks)} ranks within {timeout_s:g} s",
                got=f"{len(ranks) - len(missing)}",
                do="see why they did not start, and launch again",
            )
        ) from error
