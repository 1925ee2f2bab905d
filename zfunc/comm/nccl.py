"""Collectives over NCCL: native, coalesced, gathers and reduces in groups of their own.

Two collectives in one NCCL group run one after the other, so a gather that is prefetched and a
reduce that is pending get separate groups, hence separate streams. Uneven tensors are padded to
equal pieces here. NCCL adds in an order of its own: the same on every rank and in every run of one
topology, but not rank order.

This file has run over gloo, which offers the same calls, and never over NCCL itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zfunc.comm.blame import as_lost
from zfunc.comm.control import Control
from zfunc.comm.groups import AxisGroup, axis_groups
from zfunc.comm.pieces import CommStats, check_pieces, check_same
from zfunc.errors import LayoutError, RankLostError, explain
from zfunc.meshes import Handle, chunk_numel

__all__ = ["NcclComm", "nccl_comm"]


def nccl_comm(
    axes: Mapping[str, int],
    rank: int,
    *,
    control: Control,
    timeout_s: float,
    backend: str = "nccl",
) -> NcclComm:
    """Makes the groups of every axis, in the same order on every rank, and the communicator.

    Args:
        axes: name -> size; the mesh must cover the whole process group.
        rank: this rank.
        control: for `exchange`.
        timeout_s: the bound of every wait.
        backend: what carries the tensors.

    Raises:
        LayoutError: the mesh covers a part of the processes only.
    """
    size = math.prod(axes.values())
    if size != dist.get_world_size():
        raise LayoutError(
            explain(
                "a mesh on GPUs must cover all processes",
                expected=f"{dist.get_world_size()} ranks",
                got=size,
                do="make one mesh with more axes",
            )
        )
    timeout = timedelta(seconds=timeout_s)
    mine: dict[str, list[Any]] = {axis: [] for axis in axes}
    for axis, _ in product(axes, ("gather", "reduce")):
        for ranks in sorted({axis_groups(axes, other)[axis].ranks for other in range(size)}):
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            if rank in ranks:
                mine[axis].append(group)
    return NcclComm(axes, rank, mine, control)


class NcclComm:
    """The collectives of one rank over the axes of one mesh, on GPU tensors.

    Implements `zfunc.meshes.Comm`.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        rank: int,
        groups: Mapping[str, Sequence[Any]],
        control: Control,
    ):
        """Takes the process groups.

        Args:
            axes: name -> size.
            rank: this rank.
            groups: axis -> (process group of gathers, process group of reduces).
            control: for `exchange`.
        """
        self._places = axis_groups(axes, rank)
        self._groups = groups
        self._control = control
        self._flying: list[_Flight] = []
        self._calls = 0
        self._payload_bytes = 0

    def gather(self, axis: str, shards: Sequence[Tensor], fulls: Sequence[Tensor]) -> Handle:
        """Writes every rank's shard into its place of each full tensor."""
        place = self._places[axis]
        check_pieces(fulls, shards, place.size, place.index)
        sent, received, steps = [], [], []
        with torch.no_grad():
            for shard, full in zip(shards, fulls, strict=True):
                if not full.numel():
                    continue
                chunk = chunk_numel(full.numel(), place.size)
                whole = _room(full, chunk * place.size)
                if whole is not full:
                    steps.append(functools.partial(_copy_front, full, whole))
                sent.append(_padded(shard, chunk).view(torch.uint8))
                received.append(whole.view(torch.uint8))
        calls = [("allgather_into_tensor_coalesced", received, sent)] if sent else []
        return self._issue(place, 0, "gather", calls, steps)

    def reduce(self, axis: str, fulls: Sequence[Tensor], shards: Sequence[Tensor]) -> Handle:
        """Sums this rank's piece of each full tensor over the axis."""
        place = self._places[axis]
        check_pieces(fulls, shards, place.size, place.index, sums=True)
        calls, steps = [], []
        with torch.no_grad():
            wide = zip(fulls, shards, strict=True)
            fulls = [full.to(shard.dtype) for full, shard in wide]  # NCCL adds in one dtype
            for indices in _by_dtype(fulls):
                sent, received = [], []
                for index in indices:
                    full, shard = fulls[index], shards[index]
                    chunk = chunk_numel(full.numel(), place.size)
                    piece = _room(shard, chunk)
                    if piece is not shard:
                        steps.append(functools.partial(_copy_front, shard, piece))
                    sent.append(_real(_padded(full, chunk * place.size)))
                    received.append(_real(piece))
                calls.append(("reduce_scatter_tensor_coalesced", received, sent))
        return self._issue(place, 1, "reduce", calls, steps)

    def all_reduce(self, axis: str, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> Handle:
        """Sums each tensor over the axis, on every rank alike."""
        place = self._places[axis]
        check_same(tensors, outs)
        with torch.no_grad():
            for tensor, out in zip(tensors, outs, strict=True):
                if out.data_ptr() != tensor.data_ptr():
                    out.copy_(tensor)
            calls = [
                ("allreduce_coalesced", [_real(outs[index]) for index in indices])
                for indices in _by_dtype(outs)
            ]
        return self._issue(place, 1, "all_reduce", calls, [])

    def exchange(self, payload: bytes) -> list[bytes]:
        """Gives every rank of the mesh all payloads, in rank order (control group, blocking)."""
        return self._control.exchange(payload)

    def drain(self) -> None:
        """Waits for everything in flight; after a lost rank there is nothing to wait for."""
        for flight in list(self._flying):
            try:
                flight.wait()
            except RankLostError:
                break
        self._flying.clear()

    def stats(self) -> CommStats:
        """What this rank has started: a message is one native call, bytes are its inputs."""
        return CommStats(self._calls, self._payload_bytes, self._control.count)

    def _issue(
        self,
        place: AxisGroup,
        group: int,
        kind: str,
        calls: Sequence[tuple[Any, ...]],
        steps: Sequence[Callable[[], None]],
    ) -> _Flight:
        doing = f"{kind} over axis {place.axis!r}"
        works = []
        for name, *tensors in calls:
            with as_lost(doing):
                works.append(getattr(self._groups[place.axis][group], name)(*tensors))
            self._calls += 1
            self._payload_bytes += sum(t.numel() * t.element_size() for t in tensors[-1])
        flight = _Flight(works, steps, doing, self._flying.remove)
        self._flying.append(flight)
        return flight


class _Flight:
    """Native calls in flight, and the copies out of padded buffers."""

    def __init__(
        self,
        works: Sequence[Any],
        steps: Sequence[Callable[[], None]],
        doing: str,
        close: Callable[[_Flight], None],
    ):
        self._works = list(works)
        self._steps = list(steps)
        self._doing = doing
        self._close = close
        self._open = True

    def wait(self) -> None:
        """Makes the current stream wait until the results are complete."""
        if not self._open:
            return
        with as_lost(self._doing):
            while self._works:
                self._works.pop().wait()
        with torch.no_grad():
            while self._steps:
                self._steps.pop()()
        self._open = False
        self._close(self)


def _padded(tensor: Tensor, numel: int) -> Tensor:
    """The tensor itself, or a copy with zeros behind it."""
    if tensor.numel() == numel:
        return tensor
    padded = tensor.new_zeros(numel)
    padded[: tensor.numel()].copy_(tensor)
    return padded


def _room(tensor: Tensor, numel: int) -> Tensor:
    """The tensor itself, or a longer one to receive into."""
    return tensor if tensor.numel() == numel else tensor.new_empty(numel)


def _copy_front(target: Tensor, source: Tensor) -> None:
    target.copy_(source[: target.numel()])


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs: their sums are those of the parts."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The tensors with elements, by dtype."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())
