"""Programs: the cache from signatures to compiled programs of one function.

Capturing and planning happen once per signature; a step whose signature is known costs a lookup.
The cache is bounded: the program used longest ago is dropped first. A function that cannot be
traced, or that comes with ever new shapes, goes to the dynamic rung, if all that it needs whole
fits.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from zfunc import tree
from zfunc.agree import hash_of
from zfunc.capture import Argument, Traced, difference, to_program, trace_forward, trace_loss
from zfunc.capture.graph import capture, leaf_of
from zfunc.errors import BudgetError, CaptureError, explain
from zfunc.execute import Executor, Outcome
from zfunc.meshes import Mesh
from zfunc.params import ParamTable, checksum
from zfunc.passes import build
from zfunc.passes.whole import call_program, whole_program
from zfunc.program.digest import digest, pattern
from zfunc.program.ir import Collective, Program, draws
from zfunc.settings import Capture, Prefetch, check_capture

__all__ = ["Compiled", "Programs", "takes_key"]

_LOG = logging.getLogger("zfunc")
# The same on every rank, whatever its options: ranks must forget what they agreed on alike.
_MAX_AGREED = 256
_MAX_NOTED = 64


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A program, ready to run.

    Attributes:
        program: the program after all passes.
        executor: runs it.
        micros: per micro-batch, the program as captured.
        traced: per micro-batch, what the outputs mean; empty on the dynamic rung.
        digest: of its sequence of collectives.
        pattern: of the micro-batches (see `zfunc.program.digest.pattern`) and the budget.
        draws: whether some op draws from the global generator.
        seconds: what capture and passes took.
    """

    program: Program
    executor: Executor
    micros: tuple[Program, ...]
    traced: tuple[Traced, ...]
    digest: bytes
    pattern: bytes
    draws: bool
    seconds: float

    @property
    def rung(self) -> str:
        """ "traced" or "dynamic"."""
        return "traced" if self.traced else "dynamic"

    def aux(self, outcome: Outcome, micro: int) -> Any:
        """What the function returned besides the loss, for one micro-batch."""
        if not self.traced:
            return outcome.aux[micro]
        ends, traced = self.program.micros[micro], self.traced[micro]
        tensors = iter(ends.aux)
        leaves = [outcome.env[next(tensors)] if leaf is None else leaf for leaf in traced.statics]
        return tree.unflatten(traced.aux, leaves)

    def with_program(self, program: Program, mesh: Mesh) -> Compiled:
        """The same function under another program."""
        return dataclasses.replace(
            self, program=program, executor=Executor(program, mesh), digest=digest(program)
        )


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
        capture: Capture | str = "auto",
        plan: Callable[..., Program] = build,
    ):
        """Starts with no program.

        Args:
            function: what to capture.
            mesh: the mesh.
            prefetch: the byte budgets.
            capture: a rung, or a `Capture`.
            plan: the passes, called as `build` is.
        """
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.mesh = mesh
        self.prefetch = prefetch
        self.capture = check_capture(capture)
        self.plan = plan
        self.takes_key = takes_key(function)
        self.hits = 0
        self.misses = 0
        self.agreed = Bounded[Hashable, Any](_MAX_AGREED)
        self.resolved = Bounded[Hashable, Compiled](self.capture.max_signatures)
        self._known = Bounded[Hashable, Compiled](self.capture.max_signatures)
        self._captured = Bounded[Hashable, tuple[Traced, Program]](self.capture.max_signatures)
        self._checked = Bounded[Hashable, int](self.capture.max_signatures)
        # States may outlive the tables that a step remembers, so these are bounded by themselves.
        self._calls = Bounded[ParamTable, tuple[int, tuple[Argument, ...]]](_MAX_NOTED)
        self._dynamic = Bounded[ParamTable, bool](_MAX_NOTED)

    def loss(
        self,
        table: ParamTable,
        batches: Sequence[Argument],
        *,
        update: bool,
        has_aux: bool,
        scaled: bool = False,
    ) -> Compiled:
        """The program of a step (`update`) or of a loss and its gradient.

        Raises:
            CaptureError: the loss cannot be captured on the rungs that are allowed.
            BudgetError: it needs more than the budget.
        """

        def trace(batch: Argument, **how: bool) -> Traced:
            return trace_loss(
                self.function,
                table.argument,
                batch,
                key=self.takes_key,
                has_aux=has_aux,
                scaled=scaled,
                **how,
            )

        return self._choose(("loss", update), table, tuple(batches), trace, update)

    def forward(self, table: ParamTable, args: Argument) -> Compiled:
        """The program of the function alone; `args` describes the tuple of further arguments."""

        def trace(args: Argument, **how: bool) -> Traced:
            return trace_forward(self.function, table.argument, args, **how)

        return self._choose(("forward", False), table, (args,), trace, False)

    def is_dynamic(self, table: ParamTable) -> bool:
        """Whether calls with these parameters are on the dynamic rung."""
        return self.capture.rung == "dynamic" or self._dynamic.get(table) is not None

    def forget(self, table: ParamTable) -> None:
        """Drops what was noted of a structure of parameters that is no longer in use."""
        self._calls.drop(table)
        self._dynamic.drop(table)

    @property
    def compiled(self) -> list[Compiled]:
        """The programs in the cache, the one used last at the end."""
        return list(self._known.values())

    def _choose(
        self,
        kind: tuple[str, bool],
        table: ParamTable,
        batches: tuple[Argument, ...],
        trace: Callable[..., Traced],
        update: bool,
    ) -> Compiled:
        """Finds a program, or captures one on the highest rung that takes the function."""
        refusal: CaptureError | None = None
        if not self.is_dynamic(table):
            signature = (kind, table, batches, _modes(self.mesh.device))
            try:
                return self._trace_or_find(signature, table, batches, trace, update)
            except CaptureError as error:
                if self.capture.rung == "traced" or not error.runs_dynamic:
                    raise
                refusal = error
        key = (kind, table, len(batches))
        found = self._known.get(key)
        self.hits += found is not None
        if found is None:
            self.misses += 1
            try:
                found = self._call(table, len(batches), update, kind[0] == "loss")
            except BudgetError as error:
                raise error from refusal
            self._known.put(key, found)
        if refusal is not None:
            _LOG.warning("%s runs on the dynamic rung: %s", self.name, refusal)
            self._dynamic.put(table, True)
        return found

    def _trace_or_find(
        self,
        signature: tuple[Any, ...],
        table: ParamTable,
        batches: tuple[Argument, ...],
        trace: Callable[..., Traced],
        update: bool,
    ) -> Compiled:
        found = self._known.get(signature)
        if found is not None:
            self.hits += 1
            if self.capture.check_every:
                self._check_in_turn(signature, found, batches, trace)
            return found
        self._count_shapes(table, batches, signature[0])
        self.misses += 1
        start = time.perf_counter()
        captured = [self._trace(table, batch, signature[-1], trace) for batch in batches]
        micros = tuple(program for _, program in captured)
        budgets = self.prefetch
        program = self.plan(
            micros,
            self.mesh,
            update=update,
            live_bytes=budgets.live_bytes,
            ahead_bytes=budgets.ahead_bytes,
        )
        traced = tuple(one for one, _ in captured)
        made = self._compiled(program, micros, traced, start)
        self._known.put(signature, made)
        return made

    def _call(self, table: ParamTable, num_micros: int, update: bool, has_loss: bool) -> Compiled:
        """The program that calls the function as it is."""
        start = time.perf_counter()
        leaves = [leaf_of(slot, 0) for slot in table.slots]
        micros = (call_program(self.name, leaves, has_loss=has_loss),) * num_micros
        program = whole_program(
            micros, self.mesh, update=update, live_bytes=self.prefetch.live_bytes
        )
        return self._compiled(program, micros, (), start)

    def _compiled(
        self,
        program: Program,
        micros: tuple[Program, ...],
        traced: tuple[Traced, ...],
        start: float,
    ) -> Compiled:
        drawing = not traced or any(draws(op) for op in program.ops)
        seconds = time.perf_counter() - start
        executor = Executor(program, self.mesh)
        plans_by = hash_of(pattern(micros), self.prefetch.live_bytes)
        hashes = digest(program), plans_by
        return Compiled(program, executor, micros, traced, *hashes, drawing, seconds)

    def _count_shapes(
        self, table: ParamTable, batches: tuple[Argument, ...], kind: tuple[str, bool]
    ) -> None:
        """Sends a function to the dynamic rung whose shapes never end, if it can run there."""
        count, before = self._calls.get(table) or (0, batches)
        self._calls.put(table, (count + 1, batches))
        if self.capture.rung != "auto" or count != self.capture.max_shape_misses:
            return
        advice = explain(
            f"{self.name} was called with {count + 1} different signatures",
            expected=f"at most {count}",
            got=difference(before, batches),
            do="pad to a few lengths (length buckets), or raise Capture(max_shape_misses=)",
        )
        try:
            if any(_communicates(micro) for known in self.compiled for micro in known.micros):
                raise CaptureError("it has collectives of its own")
            self._call(table, len(batches), kind[1], kind[0] == "loss")
        except (BudgetError, CaptureError) as obstacle:
            _LOG.warning("%s\n  goes on being captured: dynamic, %s", advice, obstacle)
            return
        raise CaptureError(advice, runs_dynamic=True)

    def _check_in_turn(
        self,
        signature: Hashable,
        found: Compiled,
        batches: tuple[Argument, ...],
        trace: Callable[..., Traced],
    ) -> None:
        """Checks at every so many calls of a signature."""
        calls = (self._checked.get(signature) or 0) + 1
        self._checked.put(signature, calls)
        if calls % self.capture.check_every == 0:
            self._check(found, batches, trace)

    def _check(
        self, found: Compiled, batches: tuple[Argument, ...], trace: Callable[..., Traced]
    ) -> None:
        """Traces again and compares: the function may depend on Python state."""
        for batch, old, micro in zip(batches, found.traced, found.micros, strict=True):
            new = trace(batch)
            again = to_program(new, self.name)
            # As text NaN is like NaN.
            same = again.ops == micro.ops or repr(again.ops) == repr(micro.ops)
            same = same and again.values == micro.values
            same = same and _sums(again.constants) == _sums(micro.constants)
            if not same or new.statics != old.statics:
                raise CaptureError(
                    explain(
                        f"{self.name} traces to another graph than it did first",
                        expected="the same operators for the same signature",
                        got="a function that depends on Python state",
                        do="pass that state in the batch, where it is part of the signature",
                    )
                )

    def _trace(
        self,
        table: ParamTable,
        batch: Argument,
        modes: tuple[Any, ...],
        trace: Callable[..., Traced],
    ) -> tuple[Traced, Program]:
        """Equal micro-batches are traced once, with and without an update alike."""
        found = self._captured.get((table, batch, modes))
        if found is None:
            traced, program = capture(functools.partial(trace, batch), self.name)
            found = dataclasses.replace(traced, graph=None), program
            self._captured.put((table, batch, modes), found)
        return found


K = TypeVar("K")
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """A dict of bounded size that forgets what was used longest ago."""

    def __init__(self, max_entries: int):
        self._max_entries = max_entries
        self._entries: collections.OrderedDict[K, V] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The entry, which becomes the one used last, or None."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: K, value: V) -> None:
        """Adds an entry, which becomes the one used last, or replaces it."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def drop(self, key: K) -> None:
        """Removes an entry, if there is one."""
        self._entries.pop(key, None)

    def values(self) -> list[V]:
        """All entries, the one used last at the end."""
        return list(self._entries.values())


def _modes(device: torch.device) -> tuple[Any, ...]:
    """The modes of torch that a trace depends on."""
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else None
    return dtype, torch.get_default_dtype()


def _sums(constants: Mapping[int, torch.Tensor]) -> dict[int, int]:
    """A checksum of each tensor that a function makes from Python data."""
    return {value: checksum(tensor) for value, tensor in constants.items()}


def _communicates(micro: Program) -> bool:
    """Whether a function has collectives of its own, which the dynamic rung refuses."""
    asks = any(isinstance(op, Collective) for op in micro.ops)
    return asks or not all(leaf.is_param for leaf in micro.leaves)


def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a function declares a parameter called `key`."""
    try:
        return "key" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
