"""An adversarial communicator: right results, at the worst time that the protocol allows.

It reads inputs late (so a caller that changes a tensor in flight is found out), completes calls in
a random order, keeps outputs full of NaN until they are awaited, and fails on request. Every
decision comes from the seed and the sequence of calls, so ranks that make the same calls with the
same seed agree on the order, and the wrapped communicator sees one order everywhere.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zfunc.comm import CommStats
from zfunc.meshes import Comm, Handle, Mesh

__all__ = ["AdversaryComm", "InjectedFault", "adversary"]


class InjectedFault(RuntimeError):
    """The fault that was asked for."""


def adversary(
    mesh: Mesh, seed: int, *, fail_at: int | None = None, rank: int | None = None
) -> Mesh:
    """Wraps the communicator of a mesh.

    Args:
        mesh: any mesh; one without a communicator is returned as it is.
        seed: decides the order in which calls complete; the same on every rank.
        fail_at: the number of the call (gather, reduce, all_reduce or exchange, from 0) that raises
            `InjectedFault` instead of being made.
        rank: the rank that fails; None for all.

    Returns:
        An equal mesh.
    """
    if mesh.comm is None:
        return mesh
    mine = fail_at if rank is None or rank == mesh.rank else None
    return dataclasses.replace(mesh, comm=AdversaryComm(mesh.comm, seed, fail_at=mine))


class AdversaryComm:
    """Implements `zfunc.meshes.Comm` over another one."""

    def __init__(self, inner: Comm, seed: int, *, fail_at: int | None = None):
        self.inner = inner
        self.calls = 0
        self._random = random.Random(seed)
        self._fail_at = fail_at
        self._deferred: list[_Deferred] = []

    def gather(self, axis: str, shards: Sequence[Tensor], fulls: Sequence[Tensor]) -> Handle:
        return self._defer(self.inner.gather, axis, shards, fulls)

    def reduce(self, axis: str, fulls: Sequence[Tensor], shards: Sequence[Tensor]) -> Handle:
        return self._defer(self.inner.reduce, axis, fulls, shards)

    def all_reduce(self, axis: str, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> Handle:
        return self._defer(self.inner.all_reduce, axis, tensors, outs)

    def exchange(self, payload: bytes) -> list[bytes]:
        self._next_call()
        self.complete_some()
        return self.inner.exchange(payload)

    def drain(self) -> None:
        self._deferred.clear()
        self.inner.drain()

    def stats(self) -> CommStats:
        return self.inner.stats()  # pyright: ignore[reportAttributeAccessIssue]

    def complete_some(self, wanted: _Deferred | None = None) -> None:
        """Completes a random part of what is deferred, in random order, `wanted` among it."""
        chosen = [call for call in self._deferred if self._random.random() < 0.3 or call is wanted]
        self._random.shuffle(chosen)
        for call in chosen:
            self._deferred.remove(call)
            call.complete()

    def _defer(
        self,
        issue: Callable[[str, Sequence[Tensor], Sequence[Tensor]], Handle],
        axis: str,
        inputs: Sequence[Tensor],
        outs: Sequence[Tensor],
    ) -> Handle:
        self._next_call()
        call = _Deferred(self, issue, axis, inputs, outs)
        self._deferred.append(call)
        self.complete_some()
        return call

    def _next_call(self) -> None:
        number = self.calls
        self.calls += 1
        if number == self._fail_at:
            raise InjectedFault(f"call {number} fails, as asked for")


class _Deferred:
    """A call that is made some time between its issue and its wait, into buffers of its own."""

    def __init__(
        self,
        comm: AdversaryComm,
        issue: Callable[[str, Sequence[Tensor], Sequence[Tensor]], Handle],
        axis: str,
        inputs: Sequence[Tensor],
        outs: Sequence[Tensor],
    ):
        self._comm = comm
        self._issue = issue
        self._axis = axis
        self._inputs = list(inputs)
        self._outs = list(outs)
        self._results: list[Tensor] | None = None
        self._taken = False
        inputs_at = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        for out in outs:
            # An output that shares memory with an input must still be read from.
            if out.untyped_storage().data_ptr() not in inputs_at:
                _spoil(out)

    def complete(self) -> None:
        """Makes the call now; the caller does not see it yet."""
        self._results = [torch.empty_like(out) for out in self._outs]
        self._issue(self._axis, self._inputs, self._results).wait()
        self._inputs = []

    def wait(self) -> None:
        if self._taken:
            return
        if self._results is None:
            self._comm.complete_some(self)
        assert self._results is not None
        with torch.no_grad():
            for out, result in zip(self._outs, self._results, strict=True):
                out.copy_(result)
        self._taken = True
        self._outs = []
        self._results = None


def _spoil(tensor: Tensor) -> None:
    """Fills a tensor with NaN, or with the largest number if it has none."""
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)
