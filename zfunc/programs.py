"""Programs: the cache from signatures to compiled programs of one function.

Capturing and planning happen once per signature; a step whose signature is known costs a lookup. The
cache is bounded: the program used longest ago is dropped first.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from zfunc import tree
from zfunc.capture import Argument, to_program, trace_forward, trace_loss
from zfunc.capture.trace import Traced
from zfunc.execute import Executor
from zfunc.meshes import Mesh
from zfunc.params import ParamTable
from zfunc.passes import build
from zfunc.program.digest import collective_lines, digest
from zfunc.program.ir import Compute, Program

__all__ = ["Compiled", "Prefetch", "Programs", "takes_key"]

MAX_PROGRAMS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Prefetch:
    """Byte budgets of one rank.

    Attributes:
        live_bytes: the most that gathered copies, values derived from parameters alone, full
            gradients awaiting reduce and receive buffers may occupy together. None: a quarter of
            `Hardware.device_bytes`, or what the program needs if that is more.
        ahead_bytes: the most that is gathered before it is needed. None: twice the largest gather.

    Example:
        >>> Prefetch(live_bytes=100_000_000)
        Prefetch(live_bytes=100000000, ahead_bytes=None)
    """

    live_bytes: int | None = None
    ahead_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A program, ready to run.

    Attributes:
        program: the program after all passes.
        executor: runs it.
        traced: per micro-batch, what the outputs mean.
        digest: of its sequence of collectives.
        draws: whether some op draws from the global generator.
        seconds: what capture and passes took.
    """

    program: Program
    executor: Executor
    traced: tuple[Traced, ...]
    digest: bytes
    draws: bool
    seconds: float

    @property
    def lines(self) -> str:
        """The sequence of collectives as text."""
        return "\n".join(collective_lines(self.program))

    def aux(self, env: list[Any], micro: int) -> Any:
        """What the function returned besides the loss, for one micro-batch."""
        ends, traced = self.program.micros[micro], self.traced[micro]
        tensors = iter(ends.aux)
        leaves = [env[next(tensors)] if leaf is None else leaf for leaf in traced.statics]
        return tree.unflatten(traced.aux, leaves)


class Programs:
    """Captures and compiles one function per signature.

    Attributes:
        hits: how many lookups found a program.
        misses: how many had to capture.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Mesh,
        prefetch: Prefetch,
        plan: Callable[..., Program] = build,
    ):
        """Starts with no program.

        Args:
            function: what to capture.
            mesh: the mesh.
            prefetch: the byte budgets.
            plan: the passes, called as `build` is.
        """
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.mesh = mesh
        self.prefetch = prefetch
        self.plan = plan
        self.takes_key = takes_key(function)
        self.hits = 0
        self.misses = 0
        self._known: collections.OrderedDict[Hashable, Compiled] = collections.OrderedDict()
        self._captured: collections.OrderedDict[Hashable, Traced] = collections.OrderedDict()

    def loss(
        self, table: ParamTable, batches: Sequence[Argument], *, update: bool, has_aux: bool
    ) -> Compiled:
        """The program of a step (`update`) or of a loss and its gradient."""

        def trace(batch: Argument) -> Traced:
            return trace_loss(
                self.function, table.argument, batch, key=self.takes_key, has_aux=has_aux
            )

        return self._lookup(("loss", table, tuple(batches), update), table, batches, trace, update)

    def forward(self, table: ParamTable, args: Argument) -> Compiled:
        """The program of the function alone; `args` describes the tuple of further arguments."""

        def trace(args: Argument) -> Traced:
            return trace_forward(self.function, table.argument, args)

        return self._lookup(("forward", table, args), table, [args], trace, False)

    @property
    def compiled(self) -> list[Compiled]:
        """The programs in the cache, the one used last at the end."""
        return list(self._known.values())

    def _lookup(
        self,
        signature: Hashable,
        table: ParamTable,
        batches: Sequence[Argument],
        trace: Callable[[Argument], Traced],
        update: bool,
    ) -> Compiled:
        found = self._known.get(signature)
        if found is not None:
            self.hits += 1
            self._known.move_to_end(signature)
            return found
        self.misses += 1
        start = time.perf_counter()
        traced = tuple(self._trace(table, batch, trace) for batch in batches)
        program = self.plan(
            [to_program(one, self.name) for one in traced],
            self.mesh,
            update=update,
            live_bytes=self.prefetch.live_bytes,
            ahead_bytes=self.prefetch.ahead_bytes,
        )
        made = Compiled(
            program,
            Executor(program, self.mesh),
            traced,
            digest(program),
            _draws(program),
            time.perf_counter() - start,
        )
        self._known[signature] = made
        while len(self._known) > MAX_PROGRAMS:
            self._known.popitem(last=False)
        return made

    def _trace(
        self, table: ParamTable, batch: Argument, trace: Callable[[Argument], Traced]
    ) -> Traced:
        """Equal micro-batches are traced once."""
        key = (table, batch)
        if key not in self._captured:
            self._captured[key] = trace(batch)
            while len(self._captured) > MAX_PROGRAMS:
                self._captured.popitem(last=False)
        return self._captured[key]


def _draws(program: Program) -> bool:
    return any(
        torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())
        for op in program.ops
        if isinstance(op, Compute)
    )


def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a function declares a parameter called `key`."""
    try:
        return "key" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


