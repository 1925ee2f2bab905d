"""An independent checker of programs: every pass must keep these rules, whatever it gains.

It shares no code with the passes: it reads the op list and keeps its own account of what exists.
`check_stage` knows that before `pack` leaves and derived values are read as virtual ones; `check`
is for what an executor is given. `tests.equivalence` compares with the program before a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

from tests.equivalence import CheckError, Names, check_same_computation
from zfunc.program.ir import (
    Accumulate,
    Call,
    Collective,
    Compute,
    Free,
    Gather,
    Op,
    Program,
    Reduce,
    Rng,
    Status,
    Update,
    Wait,
    reads,
    refs,
    writes,
)

__all__ = [
    "STAGES",
    "CheckError",
    "check",
    "check_same_collectives",
    "check_stage",
    "collective_sequence",
    "live_bytes",
]

STAGES = ("capture", "remat", "accumulate", "derive", "pack", "order", "prefetch")

_PLANNED = ("copy", "derived", "grad")
_GIVEN = ("input", "leaf", "constant")
_DIRECT_BYTES = 1 << 18


def check(
    program: Program,
    *,
    budget_bytes: int | None = None,
    before: Program | Sequence[Program] | None = None,
    united: bool = False,
) -> None:
    """Raises `CheckError` unless a program after all passes is sound."""
    check_stage(program, "prefetch", budget_bytes=budget_bytes, before=before, united=united)


def check_stage(
    program: Program,
    stage: str,
    *,
    budget_bytes: int | None = None,
    before: Program | Sequence[Program] | None = None,
    united: bool = False,
    names: Names | None = None,
) -> None:
    """Raises `CheckError` unless a program is sound as far as it can be after `stage`.

    Args:
        program: what the pass returned.
        stage: one of `STAGES`.
        budget_bytes: the most live bytes; the program's own limit if not given.
        before: the program that the pass was given, or one per micro-batch.
        united: whether it takes part in what only other ranks need.
        names: those of programs that were checked before it.
    """
    planned = STAGES.index(stage) >= STAGES.index("pack")
    _Machine(program, planned).run()
    limit = program.limit_bytes if budget_bytes is None else budget_bytes
    if planned and limit is not None:
        for at, nbytes in enumerate(live_bytes(program)):
            if nbytes > limit:
                _fail(at, program.ops[at], f"{nbytes} live bytes exceed the budget of {limit}")
    if before is not None:
        check_same_computation(program, before, united=united, names=names)


def _fail(at: int, op: Op | None, rule: str) -> NoReturn:
    where = "at the end" if op is None else f"op {at} {type(op).__name__}"
    raise CheckError(f"{where}: {rule}" + ("" if op is None else f"\n{op}"))


class _Machine:
    """Performs the ops on paper: what is written, alive, in flight."""

    def __init__(self, program: Program, planned: bool):
        self.program = program
        self.planned = planned
        self.owner = [value.owner for value in program.values]
        self.given = set(program.constants)
        for micro in program.micros:
            self.given.update(micro.inputs)
            self.given.update([] if micro.key is None else [micro.key])
        self.given.update(leaf.full for leaf in program.leaves if leaf.resident or not planned)
        self.virtual = set() if planned else set(program.derived)
        self.written: set[int] = set()
        self.alive: set[int] = set()
        self.freed: set[int] = set()
        self.incomplete: dict[int, int] = {}
        self.lent: dict[int, int] = {}
        self.flights: dict[int, Op] = {}
        self.tokens: set[int] = set()
        self.recorded: set[int] = set()
        self.replaying = False
        self.commit: Status | None = None
        self.updates = 0
        self.at = 0
        self.op: Op | None = None

    def fail(self, rule: str) -> NoReturn:
        _fail(self.at, self.op, rule)

    def run(self) -> None:
        for at, op in enumerate(self.program.ops):
            self.at, self.op = at, op
            getattr(self, type(op).__name__.lower())(op)
        self.op = None
        self.end()

    def read(self, value: int) -> None:
        owner = self.owner[value]
        if value in self.given or value in self.virtual:
            return
        if value not in self.written:
            self.fail(f"v{value} is read but does not exist")
        if owner in self.freed:
            self.fail(f"v{value} is read after its storage v{owner} was freed")
        if owner in self.incomplete:
            self.fail(f"v{value} is read before wait #{self.incomplete[owner]}")

    def write(self, *values: int) -> None:
        for value in sorted(values, key=lambda v: self.owner[v] != v):
            owner = self.owner[value]
            if value in self.written or value in self.given or value in self.virtual:
                self.fail(f"v{value} is written twice")
            self.written.add(value)
            if owner == value:
                self.alive.add(owner)
            elif owner not in self.given | self.virtual | self.alive:
                self.fail(f"v{value} uses the storage of v{owner}, which does not exist")
            elif owner in self.incomplete:
                self.fail(f"v{value} uses v{owner} before wait #{self.incomplete[owner]}")

    def overwrite(self, value: int, *, derives: bool = False) -> None:
        owner = self.owner[value]
        role = self.program.values[owner].role
        if owner in self.lent:
            self.fail(f"v{value} is overwritten while #{self.lent[owner]} sends it")
        if role in (*_GIVEN, "copy") or (role == "derived" and not derives):
            self.fail(f"v{value} is overwritten, but its storage is a {role}")

    def issue(self, op: Gather | Reduce) -> None:
        if op.token in self.tokens:
            self.fail(f"token #{op.token} is issued twice")
        self.tokens.add(op.token)
        self.flights[op.token] = op
        self.write(*op.outs)
        for out in op.outs:
            if self.owner[out] != out:
                self.fail(f"v{out} has no storage of its own")
            self.incomplete[out] = op.token

    def compute(self, op: Compute) -> None:
        for value in reads(op):
            self.read(value)
        for value in _mutated(op):
            self.overwrite(value, derives=op.phase == "derive")
        self.write(*writes(op))

    def gather(self, op: Gather) -> None:
        self.issue(op)
        for i, out in zip(op.leaves, op.outs, strict=True):
            leaf, value = self.program.leaves[i], self.program.values[out]
            if leaf.resident:
                self.fail(f"{leaf.path} is resident and is gathered")
            if leaf.layouts.params.axis != op.axis:
                self.fail(f"{leaf.path} is not cut over {op.axis}")
            if value.role != "copy" or value.spec.shape != leaf.spec.shape:
                self.fail(f"v{out} is no copy of {leaf.path}")

    def reduce(self, op: Reduce) -> None:
        for value in op.ins:
            self.read(value)
        self.issue(op)
        for i, value, out in zip(op.leaves, op.ins, op.outs, strict=True):
            self.lent[self.owner[value]] = op.token
            mesh, whole = self.program.leaves[i].layouts.params.mesh, self.spec(value).numel
            piece = _piece_sizes(whole, mesh.axes[op.axis])[mesh.index(op.axis)]
            if self.spec(out).numel != (piece if op.scatter else whole):
                self.fail(f"v{out} has not the size of the sum of v{value}")

    def spec(self, value: int) -> Any:
        return self.program.values[value].spec

    def wait(self, op: Wait) -> None:
        if op.token not in self.flights:
            awaited = "was awaited before" if op.token in self.tokens else "was never issued"
            self.fail(f"token #{op.token} {awaited}")
        del self.flights[op.token]
        for table in (self.incomplete, self.lent):
            for owner in [owner for owner, token in table.items() if token == op.token]:
                del table[owner]

    def free(self, op: Free) -> None:
        for value in op.values:
            owner = self.owner[value]
            if value not in self.written or owner in self.given:
                self.fail(f"v{value} is freed but was not made")
            if owner in self.freed:
                self.fail(f"v{value} is freed twice")
            if owner in self.incomplete or owner in self.lent:
                self.fail(f"v{value} is freed while in flight")
            self.freed.add(owner)
            self.alive.discard(owner)

    def accumulate(self, op: Accumulate) -> None:
        for into, value in zip(op.into, op.ins, strict=True):
            self.read(into)
            self.read(value)
            self.overwrite(into)
            if self.spec(into) != self.spec(value):
                self.fail(f"v{into} and v{value} differ in shape or dtype")

    def collective(self, op: Collective) -> None:
        self.read(op.source)
        self.write(op.out)

    def call(self, op: Call) -> None:
        for value in reads(op):
            self.read(value)
        self.write(*writes(op))

    def rng(self, op: Rng) -> None:
        if op.action == "record":
            if self.replaying:
                self.fail(f"state {op.slot} is recorded inside a replay")
            self.recorded.add(op.slot)
        elif op.action == "replay":
            if op.slot not in self.recorded or self.replaying:
                self.fail(f"state {op.slot} is replayed but not recorded, or inside a replay")
            self.replaying = True
        else:
            if not self.replaying:
                self.fail("the state is restored outside of a replay")
            self.replaying = False

    def status(self, op: Status) -> None:
        for value in reads(op):
            self.read(value)
        if self.commit is not None:
            self.fail("there is a second status")
        if op.losses != tuple(m.loss for m in self.program.micros if m.loss is not None):
            self.fail("the losses are not those of the micro-batches")
        if len(op.grads) != sum(leaf.trainable for leaf in self.program.leaves):
            self.fail("there is not one gradient per trainable leaf")
        self.commit = op

    def update(self, op: Update) -> None:
        for value in reads(op):
            self.read(value)
        if self.commit is None or self.updates:
            self.fail("the update does not follow the one status")
        if self.flights:
            self.fail(f"the update overlaps #{min(self.flights)}")
        trainable = [i for i, leaf in enumerate(self.program.leaves) if leaf.trainable]
        if list(op.leaves) != trainable or op.grads != self.commit.grads:
            self.fail("the update is not of every trainable leaf with the gradients of the status")
        self.updates += 1

    def end(self) -> None:
        if self.replaying:
            self.fail("a replayed state is never restored")
        if self.flights:
            self.fail(f"token #{min(self.flights)} is never awaited")
        for micro in self.program.micros:
            for value in (micro.loss, micro.weight, *micro.aux):
                if value is not None:
                    self.read(value)
        if self.planned and self.updates != (self.program.mode == "step"):
            self.fail(f"mode {self.program.mode} with {self.updates} updates")
        results = () if self.commit is None else reads(self.commit)
        kept = {self.owner[value] for value in results}
        for owner in sorted(self.alive - kept):
            if self.planned and self.program.values[owner].role in _PLANNED:
                self.fail(f"v{owner}, a {self.program.values[owner].role}, is never freed")


def _mutated(op: Compute) -> tuple[int, ...]:
    """The values that an op writes in place."""
    schema = getattr(op.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    keywords = dict(op.kwargs)
    found: list[int] = []
    for place, argument in enumerate(schema.arguments):
        given = op.args[place] if place < len(op.args) else keywords.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += refs(given)
    return tuple(found)


def _piece_sizes(numel: int, ranks: int) -> list[int]:
    """Elements of each rank's piece of a tensor."""
    longest = math.ceil(numel / ranks)
    return [max(0, min(longest, numel - rank * longest)) for rank in range(ranks)]


def live_bytes(program: Program) -> list[int]:
    """Live bytes during each op: copies, derived values, gradients, buffers in flight."""
    values = program.values
    alive: set[int] = set()
    buffers: dict[int, int] = {}
    during: list[int] = []
    for op in program.ops:
        alive |= {values[v].owner for v in writes(op)}
        if isinstance(op, Reduce):
            buffers[op.token] = op.receive_bytes
        if isinstance(op, Gather):
            ranks = program.leaves[op.leaves[0]].layouts.params.mesh.axes[op.axis]
            specs = [values[out].spec for out in op.outs]
            buffers[op.token] = sum(_staged_bytes(spec, ranks) for spec in specs)
        planned = sum(values[o].nbytes for o in alive if values[o].role in _PLANNED)
        during.append(planned + sum(buffers.values()))
        if isinstance(op, Wait):
            del buffers[op.token]
        if isinstance(op, Free):
            alive -= {values[v].owner for v in op.values}
    return during


def _staged_bytes(spec: Any, ranks: int) -> int:
    """The most that a rank receives of a small tensor before it copies it to its place."""
    sizes = [numel * spec.dtype.itemsize for numel in _piece_sizes(spec.numel, ranks)]
    return 0 if max(sizes) >= _DIRECT_BYTES else sum(sizes) - min(sizes)


def collective_sequence(program: Program) -> list[tuple[Any, ...]]:
    """Every collective with what all ranks must agree on."""
    found: list[tuple[Any, ...]] = []
    for op in program.ops:
        if isinstance(op, Gather | Reduce):
            moved = op.outs if isinstance(op, Gather) else op.ins
            leaves = [program.leaves[i] for i in op.leaves]
            rows = [
                (leaf.path, leaf.spec.shape, program.values[v].spec.dtype)
                for leaf, v in zip(leaves, moved, strict=True)
            ]
            found.append((type(op), op.axis, getattr(op, "scatter", None), *rows))
        elif isinstance(op, Collective):
            whole = op.shape if op.name == "gather" else program.values[op.source].spec.shape
            found.append((type(op), op.axis, op.name, whole, program.values[op.out].spec.dtype))
        elif isinstance(op, Status):
            found.append((type(op), len(op.losses), len(op.weights)))
        elif isinstance(op, Update):
            found.append((type(op), *(program.leaves[i].path for i in op.leaves)))
    return found


def check_same_collectives(left: Program, right: Program) -> None:
    """Raises `CheckError` unless two programs make the same collectives in the same order."""
    pairs = zip(collective_sequence(left), collective_sequence(right), strict=False)
    for number, (one, other) in enumerate(pairs):
        if one != other:
            raise CheckError(f"collective {number} differs\n{one}\n{other}")
    if len(collective_sequence(left)) != len(collective_sequence(right)):
        raise CheckError("one program has more collectives than the other")
