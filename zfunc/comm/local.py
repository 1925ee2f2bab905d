"""Virtual ranks: N ranks of a mesh as threads of one process that take turns.

A rank deposits a copy of its tensors when it issues a collective, and hands over only where it must
wait for a peer's deposit. Nothing runs at the same time, so results, generator states and failures
are the same in every run, and code that is not thread-safe (tracing) may run inside a rank. Sums
are added in rank order: bit for bit those of real ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.comm.baton import Baton, Outcome
from zfunc.comm.compat import copy_all
from zfunc.comm.groups import AxisGroup, axis_groups
from zfunc.comm.pieces import (
    CommStats,
    add_in_order,
    check_pieces,
    check_same,
    count_messages,
    pieces,
    split_by_size,
)
from zfunc.errors import ProgramMismatchError, RankLostError, RemoteRankError, explain
from zfunc.meshes import Handle, Mesh, check_axes

__all__ = ["LocalMesh"]

_EVERYONE = "all ranks"


class LocalMesh:
    """A mesh of virtual ranks in this process.

    Attributes:
        axes: name -> size, the last axis varying fastest over ranks.
    """

    def __init__(self, axes: Mapping[str, int]):
        check_axes(axes)
        self.axes = dict(axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `fn(mesh, *args)` once per rank, each in a thread, one of which runs at a time.

        Each rank starts from a copy of the caller's states of torch's CPU generator, numpy and
        `random`, and keeps its own from then on; the caller's are unchanged afterwards.

        Args:
            fn: called with the rank's view of the mesh.
            args: passed to every rank as they are.

        Returns:
            The results, in rank order.

        Raises:
            Exception: the lowest rank's own exception; what others raised because a rank failed or
                returned early counts only if there is no other.
            ProgramMismatchError: ranks made calls that do not fit together.

        Example:
            >>> LocalMesh({"shard": 2}).run(lambda mesh: mesh.comm.exchange(bytes([mesh.rank])))
            [[b'\\x00', b'\\x01'], [b'\\x00', b'\\x01']]
        """
        table = _Table(self.size)
        calls = [functools.partial(fn, self._view(rank, table), *args) for rank in range(self.size)]
        outcomes = table.baton.run(calls, on_interrupt=table.interrupt)
        _raise_first(outcomes)
        return [outcome.value for outcome in outcomes]

    def _view(self, rank: int, table: _Table) -> Mesh:
        comm = None if self.size == 1 else LocalComm(self.axes, rank, table)
        return Mesh(self.axes, rank, tuple(range(self.size)), comm=comm)

    def __repr__(self) -> str:
        return f"LocalMesh({self.axes})"


class LocalComm:
    """The collectives of one virtual rank. Implements `zfunc.meshes.Comm`."""

    def __init__(self, axes: Mapping[str, int], rank: int, table: _Table):
        self._rank = rank
        self._groups = axis_groups(axes, rank)
        self._everyone = AxisGroup(_EVERYONE, tuple(range(math.prod(axes.values()))), rank)
        self._table = table
        self._counts: dict[str, int] = {}
        self._flying: list[_Pending] = []
        self._stats = CommStats()

    def gather(self, axis: str, shards: Sequence[Tensor], fulls: Sequence[Tensor]) -> Handle:
        """Writes every rank's shard into its place of each full tensor."""
        group = self._groups[axis]
        check_pieces(fulls, shards, group.size, group.index)
        split = split_by_size(fulls, group.size)
        self._count(count_messages([shards] * group.size, split, itself=group.index))

        def finish(deposits: Sequence[Sequence[Tensor]]) -> None:
            parts = [pieces(full, group.size) for full in fulls]
            for place, deposit in enumerate(deposits):
                copy_all([part[place] for part in parts], deposit)

        return self._issue("gather", group, fulls, _copies(shards), finish)

    def reduce(self, axis: str, fulls: Sequence[Tensor], shards: Sequence[Tensor]) -> Handle:
        """Sums this rank's piece of each full tensor over the axis, in rank order."""
        group = self._groups[axis]
        check_pieces(fulls, shards, group.size, group.index, sums=True)
        parts = [pieces(full, group.size) for full in _copies(fulls)]
        sent = list(zip(*parts, strict=True)) if parts else [()] * group.size
        split = split_by_size(fulls, group.size, shards)
        self._count(count_messages(sent, split, itself=group.index))

        def finish(deposits: Sequence[Sequence[Sequence[Tensor]]]) -> None:
            for index, shard in enumerate(shards):
                add_in_order([deposit[group.index][index] for deposit in deposits], shard)

        return self._issue("reduce", group, fulls, sent, finish)

    def all_reduce(self, axis: str, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> Handle:
        """Sums each tensor over the axis, in rank order, on every rank alike."""
        group = self._groups[axis]
        check_same(tensors, outs)
        self._count_all_reduce(group, tensors, outs)

        def finish(deposits: Sequence[Sequence[Tensor]]) -> None:
            for index, out in enumerate(outs):
                add_in_order([deposit[index] for deposit in deposits], out)

        return self._issue("all_reduce", group, tensors, _copies(tensors), finish)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Gives every rank of the mesh all payloads, in rank order."""
        answers: list[bytes] = []
        self._stats = dataclasses.replace(self._stats, exchanges=self._stats.exchanges + 1)
        self._issue("exchange", self._everyone, (), payload, answers.extend).wait()
        return answers

    def drain(self) -> None:
        """Abandons everything in flight."""
        for pending in list(self._flying):
            pending.close()

    def stats(self) -> CommStats:
        """What this rank would have sent so far, had it been a real one."""
        return self._stats

    def forget(self, pending: _Pending) -> None:
        """Takes a collective off the list of those in flight."""
        self._flying.remove(pending)

    def _issue(
        self,
        kind: str,
        group: AxisGroup,
        tensors: Sequence[Tensor],
        payload: Any,
        finish: Callable[[Sequence[Any]], None],
    ) -> _Pending:
        number = self._counts.get(group.axis, 0)
        self._counts[group.axis] = number + 1
        sizes = tuple((tensor.numel(), tensor.dtype) for tensor in tensors)
        call = _Call(kind, group.axis, number, sizes)
        slot = self._table.deposit(self._rank, group, call, payload)
        pending = _Pending(self, self._table, self._rank, slot, finish)
        self._flying.append(pending)
        return pending

    def _count(self, sent: tuple[int, int]) -> None:
        messages, nbytes = sent
        self._stats = dataclasses.replace(
            self._stats,
            messages=self._stats.messages + messages,
            payload_bytes=self._stats.payload_bytes + nbytes,
        )

    def _count_all_reduce(
        self, group: AxisGroup, tensors: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        split = split_by_size(tensors, 1, outs)
        whole = dataclasses.replace(split, direct=())
        self._count(count_messages([tensors] * group.size, whole, itself=group.index))
        for index in split.direct:
            alone = dataclasses.replace(split, direct=(0,), together=())
            parts = pieces(tensors[index], group.size)
            summed = [[pieces(outs[index], group.size)[group.index]]] * group.size
            for round_of in ([[part] for part in parts], summed):
                self._count(count_messages(round_of, alone, itself=group.index))


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """What must be the same on all ranks of a group."""

    kind: str
    axis: str
    number: int
    sizes: tuple[tuple[int, torch.dtype], ...]

    def __str__(self) -> str:
        if self.kind == "exchange":
            return f"exchange {self.number}"
        shown = ", ".join(f"{numel} x {str(dtype)[6:]}" for numel, dtype in self.sizes[:4])
        more = f" and {len(self.sizes) - 4} more" if len(self.sizes) > 4 else ""
        return f"{self.kind} {self.number} of [{shown}{more}] over axis {self.axis!r}"


@dataclasses.dataclass(slots=True)
class _Slot:
    """The deposits of one collective, by rank."""

    group: AxisGroup
    call: _Call
    deposits: dict[int, Any]
    taken: int = 0

    def missing(self) -> list[int]:
        return [rank for rank in self.group.ranks if rank not in self.deposits]


class _Pending:
    """One rank's part in a collective that has been issued."""

    def __init__(
        self,
        comm: LocalComm,
        table: _Table,
        rank: int,
        slot: _Slot,
        finish: Callable[[Sequence[Any]], None],
    ):
        self._comm = comm
        self._table = table
        self._rank = rank
        self._slot: _Slot | None = slot
        self._finish = finish

    def wait(self) -> None:
        """Blocks until the results are complete."""
        if self._slot is None:
            return
        self._table.await_slot(self._rank, self._slot)
        deposits = [self._slot.deposits[rank] for rank in self._slot.group.ranks]
        with torch.no_grad():
            self._finish(deposits)
        self.close()

    def close(self) -> None:
        """Gives this rank's part up: taken or abandoned."""
        if self._slot is not None:
            self._table.take(self._slot)
            self._slot = None
            self._finish = _nothing
            self._comm.forget(self)


class _Table:
    """Where the ranks of one run put their deposits down."""

    def __init__(self, size: int):
        self.baton = Baton(size, self._stuck)
        self._slots: dict[tuple[str, tuple[int, ...], int], _Slot] = {}
        self._awaited: dict[int, _Slot] = {}
        self._broken: Callable[[], Exception] | None = None

    def deposit(self, rank: int, group: AxisGroup, call: _Call, payload: Any) -> _Slot:
        """Puts down one rank's part; a call unlike that of its peers breaks the run for all."""
        self._check()
        key = (group.axis, group.ranks, call.number)
        slot = self._slots.setdefault(key, _Slot(group, call, {}))
        if slot.call != call:
            first = min(slot.deposits)
            self._break({first: slot.call, rank: call})
            self._check()
        slot.deposits[rank] = payload
        return slot

    def await_slot(self, rank: int, slot: _Slot) -> None:
        """Hands over until all deposits are there, or never will be."""

        def gone() -> list[int]:
            return [other for other in slot.missing() if other in self.baton.ended]

        def may_go() -> bool:
            return self._broken is not None or not slot.missing() or bool(gone())

        self._check()
        self._awaited[rank] = slot
        self.baton.wait_until(rank, may_go)
        del self._awaited[rank]
        self._check()
        if slot.missing():
            raise RankLostError(
                explain(
                    f"rank {gone()[0]} ended while rank {rank} waited for it in {slot.call}",
                    expected="the same calls on every rank",
                    do="see why that rank returned or failed early",
                )
            )

    def take(self, slot: _Slot) -> None:
        """Drops the deposits once every rank of the group has taken or abandoned them."""
        slot.taken += 1
        if slot.taken == slot.group.size:
            del self._slots[slot.group.axis, slot.group.ranks, slot.call.number]

    def interrupt(self) -> None:
        """Ends every wait, now and later."""
        self._broken = functools.partial(
            RankLostError, "the run of this local mesh was interrupted"
        )

    def _stuck(self) -> None:
        self._break({rank: slot.call for rank, slot in self._awaited.items()})

    def _break(self, calls: Mapping[int, _Call]) -> None:
        """Makes the mismatch the error of every rank."""
        (first, wanted), *others = sorted(calls.items(), key=lambda item: item[0])
        message = explain(
            "ranks of a local mesh made calls that do not fit together",
            expected=f"rank {first}: {wanted}",
            got="; ".join(f"rank {rank}: {call}" for rank, call in others),
            do="make the same collective calls in the same order on every rank",
        )
        self._broken = functools.partial(ProgramMismatchError, message)

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken()


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies what is deposited, so that what its owner does to it later cannot be seen."""
    with torch.no_grad():
        return [tensor.clone() for tensor in tensors]


def _raise_first(outcomes: Sequence[Outcome]) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    own = [error for error in errors if not _is_echo(error)]
    for error in own or errors:
        raise error


def _is_echo(error: BaseException | None) -> bool:
    """Whether an error only answers another rank's, directly or where it was raised from."""
    while error is not None:
        if isinstance(error, (RankLostError, RemoteRankError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _nothing(_: Sequence[Any]) -> None:
    pass
