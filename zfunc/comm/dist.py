"""Collectives over gloo, made of sends and receives.

gloo's own `reduce_scatter` is an all-reduce that blocks the caller; here every rank sends each peer
its piece and adds what it receives in rank order, so sums are the same on every rank and in every
run. All calls return at once; sums and copies out of shared messages happen in `wait`.

A tag carries the call's number on its axis and a hash of its kind, axis and sizes: calls in flight
cannot be mixed up, and ranks whose calls differ time out instead of writing into one another's
buffers.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.comm.blame import Watch
from zfunc.comm.compat import copy_all
from zfunc.comm.control import Control
from zfunc.comm.groups import AxisGroup, axis_groups
from zfunc.comm.pieces import (
    CommStats,
    add_in_order,
    check_pieces,
    check_same,
    pieces,
    split_by_size,
)
from zfunc.errors import RankLostError
from zfunc.meshes import Handle

__all__ = ["DistComm"]

_KINDS = ("gather", "reduce", "all_reduce")
_SEQUENCE_BITS = 10
_TAG_BITS = 31


class DistComm:
    """The collectives of one rank over the axes of one mesh, on CPU tensors.

    Implements `zfunc.meshes.Comm`.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        rank: int,
        *,
        data: Any,
        control: Control,
        watch: Watch,
    ):
        """Takes connected groups whose ranks are those of the mesh.

        Args:
            axes: name -> size.
            rank: this rank.
            data: gloo backend for tensors.
            control: for `exchange`.
            watch: makes the errors of lost ranks.
        """
        self._rank = rank
        self._groups = axis_groups(axes, rank)
        self._axes = tuple(axes)
        self._data = data
        self._control = control
        self._watch = watch
        self._counts: dict[str, int] = {}
        self._flying: dict[tuple[str, int], _Flight] = {}
        self._messages = 0
        self._payload_bytes = 0

    def gather(self, axis: str, shards: Sequence[Tensor], fulls: Sequence[Tensor]) -> Handle:
        """Writes every rank's shard into its place of each full tensor."""
        group = self._groups[axis]
        check_pieces(fulls, shards, group.size, group.index)
        flight = self._open("gather", group, fulls)
        with torch.no_grad():
            parts = [pieces(full, group.size) for full in fulls]
            split = split_by_size(fulls, group.size)
            for index in split.direct:
                for peer in group.peers:
                    flight.receive(parts[index][peer], peer)
                    flight.send(shards[index], peer)
                flight.then(_copy, [parts[index][group.index]], [shards[index]])
            for indices in split.together:
                mine = [shards[index] for index in indices]
                staged = torch.cat(mine)
                flight.then(_copy, [parts[index][group.index] for index in indices], mine)
                for peer in group.peers:
                    targets = [parts[index][peer] for index in indices]
                    sizes = [target.numel() for target in targets]
                    received = staged.new_empty(sum(sizes))
                    flight.receive(received, peer)
                    flight.send(staged, peer)
                    flight.then(_copy, targets, received.split(sizes))
        return flight.launch()

    def reduce(self, axis: str, fulls: Sequence[Tensor], shards: Sequence[Tensor]) -> Handle:
        """Sums this rank's piece of each full tensor over the axis, in rank order."""
        group = self._groups[axis]
        check_pieces(fulls, shards, group.size, group.index, sums=True)
        flight = self._open("reduce", group, fulls)
        with torch.no_grad():
            parts = [pieces(full, group.size) for full in fulls]
            split = split_by_size(fulls, group.size, shards)
            for index in split.direct:
                _post_sum(flight, group, parts[index], shards[index])
            for indices in split.together:
                staged = [
                    torch.cat([parts[index][place] for index in indices])
                    for place in range(group.size)
                ]
                total = torch.empty_like(staged[group.index], dtype=shards[indices[0]].dtype)
                _post_sum(flight, group, staged, total)
                targets = [shards[index] for index in indices]
                flight.then(_copy, targets, total.split([target.numel() for target in targets]))
        return flight.launch()

    def all_reduce(self, axis: str, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> Handle:
        """Sums each tensor over the axis, in rank order, on every rank alike.

        A large tensor is reduced in pieces, which `wait` then gathers; small ones go to every peer
        as they are.
        """
        group = self._groups[axis]
        check_same(tensors, outs)
        flight = self._open("all_reduce", group, tensors)
        with torch.no_grad():
            split = split_by_size(tensors, 1, outs)
            summed = [pieces(outs[index], group.size) for index in split.direct]
            for index, parts in zip(split.direct, summed, strict=True):
                _post_sum(flight, group, pieces(tensors[index], group.size), parts[group.index])
            for indices in split.together:
                staged = torch.cat([tensors[index] for index in indices])
                total = torch.empty_like(staged, dtype=outs[indices[0]].dtype)
                _post_sum(flight, group, [staged] * group.size, total)
                targets = [outs[index] for index in indices]
                flight.then(_copy, targets, total.split([target.numel() for target in targets]))
            if split.direct:
                flight.second = functools.partial(_post_gather, flight, group, summed)
        return flight.launch()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Gives every rank of the mesh all payloads, in rank order (control group, blocking)."""
        return self._control.exchange(payload)

    def drain(self) -> None:
        """Waits for everything in flight; after a lost rank there is nothing to wait for."""
        for flight in list(self._flying.values()):
            try:
                flight.wait()
            except RankLostError:
                break
        self._flying.clear()

    def stats(self) -> CommStats:
        """What this rank has sent so far."""
        return CommStats(self._messages, self._payload_bytes, self._control.count)

    def _open(self, kind: str, group: AxisGroup, fulls: Sequence[Tensor]) -> _Flight:
        self._watch.check()
        number = self._counts.get(group.axis, 0)
        self._counts[group.axis] = number + 1
        place = self._axes.index(group.axis)
        sizes = hash(tuple((full.numel(), full.element_size()) for full in fulls))
        mark = hash((_KINDS.index(kind), place, sizes)) % (1 << (_TAG_BITS - _SEQUENCE_BITS))
        tag = mark << _SEQUENCE_BITS | number % (1 << _SEQUENCE_BITS)
        doing = f"{kind} {number} ({len(fulls)} tensors over axis {group.axis!r})"
        flight = _Flight(self, group.ranks, doing, tag)
        self._flying[group.axis, number] = flight
        flight.close = functools.partial(self._flying.pop, (group.axis, number), None)
        return flight

    def advance_before(self, flight: _Flight) -> None:
        """Starts the second round of every earlier collective.

        Its peers may be waiting for that round, while this rank waits for a later collective first.
        """
        for earlier in list(self._flying.values()):
            if earlier is flight:
                return
            if earlier.second is not None:
                earlier.advance()

    def post(self, way: str, tensor: Tensor, rank: int, tag: int, doing: str) -> Any:
        """Posts one message to or from a mesh rank."""
        try:
            work = getattr(self._data, way)([tensor], rank, tag)
        except RuntimeError as error:
            raise self._watch.lost(rank, doing, error) from error
        if way == "send":
            self._messages += 1
            self._payload_bytes += tensor.numel() * tensor.element_size()
        return work

    def settle(self, work: Any, rank: int, doing: str) -> None:
        """Waits for one message."""
        self._watch.check()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._watch.lost(rank, doing, error) from error


# The messages to await, each with the rank that it comes from, and what to do then.
_Step = tuple[list[tuple[Any, int]], Callable[[], None]]


class _Flight:
    """One collective in flight: messages posted, and what to do once they have come.

    Everything that must stay alive is held by the steps, and dropped when `wait` returns.
    """

    def __init__(self, comm: DistComm, ranks: tuple[int, ...], doing: str, tag: int):
        self._comm = comm
        self._ranks = ranks
        self._doing = doing
        self._tag = tag
        self._expected: list[tuple[Any, int]] = []
        self._steps: collections.deque[_Step] = collections.deque()
        self._outgoing: list[tuple[Tensor, int]] = []
        self._sent: list[tuple[Any, int]] = []
        self._open = True
        self.second: Callable[[], None] | None = None
        self.close: Callable[[], object] = _nothing

    def receive(self, tensor: Tensor, place: int) -> None:
        """Posts the receive of a message from a place of the axis; an empty one is not sent."""
        if tensor.numel():
            rank = self._ranks[place]
            work = self._comm.post("recv", tensor, rank, self._tag, self._doing)
            self._expected.append((work, rank))

    def send(self, tensor: Tensor, place: int) -> None:
        """Queues a message until `launch`, after all receives have been posted."""
        if tensor.numel():
            self._outgoing.append((tensor.resolve_conj().resolve_neg(), self._ranks[place]))

    def then(self, step: Callable[..., None], *args: Any) -> None:
        """Does `step(*args)` in `wait`, once the messages that were received so far have come."""
        self._steps.append((self._expected, functools.partial(step, *args)))
        self._expected = []

    def launch(self) -> _Flight:
        """Posts the queued messages."""
        for tensor, rank in self._outgoing:
            work = self._comm.post("send", tensor, rank, self._tag, self._doing)
            self._sent.append((work, rank))
        self._outgoing = []
        return self

    def advance(self) -> None:
        """Ends the first round and posts the second one."""
        self._finish()
        if self.second is not None:
            post, self.second = self.second, None
            post()
            self.launch()

    def wait(self) -> None:
        """Blocks until the results are complete."""
        if not self._open:
            return
        self._comm.advance_before(self)
        self.advance()
        self._finish()
        self._open = False
        self.close()

    def _finish(self) -> None:
        # A message must not be awaited twice, so whatever has been awaited is dropped at once.
        with torch.no_grad():
            while self._steps:
                expected, step = self._steps[0]
                while expected:
                    self._comm.settle(*expected.pop(), self._doing)
                self._steps.popleft()
                step()
        while self._sent:
            self._comm.settle(*self._sent.pop(), self._doing)


def _post_sum(flight: _Flight, group: AxisGroup, parts: Sequence[Tensor], out: Tensor) -> None:
    """Posts the messages of a sum: `parts[i]` is this rank's term of what place i adds up."""
    own = parts[group.index]
    apart = own.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
    free = apart and own.dtype == out.dtype
    if not apart and group.index > 1:
        own = own.clone()  # the first two terms are written into `out` before this one is read
    terms = []
    for place in range(group.size):
        if place == group.index:
            terms.append(own)
            continue
        # The first term to come is received where the sum goes: the lowest peer is term 0 or 1.
        terms.append(out if free else torch.empty_like(own))
        free = False
        flight.receive(terms[-1], place)
    for peer in group.peers:
        flight.send(parts[peer], peer)
    flight.then(add_in_order, terms, out)


def _post_gather(flight: _Flight, group: AxisGroup, summed: Sequence[Sequence[Tensor]]) -> None:
    """Posts the messages that bring every summed piece to every rank."""
    for parts in summed:
        for peer in group.peers:
            flight.receive(parts[peer], peer)
            flight.send(parts[group.index], peer)
    flight.then(_nothing)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source that does not already lie in its place."""
    moves = [
        (target, source)
        for target, source in zip(targets, sources, strict=True)
        if target.data_ptr() != source.data_ptr()
    ]
    copy_all([target for target, _ in moves], [source for _, source in moves])


def _nothing() -> None:
    pass
