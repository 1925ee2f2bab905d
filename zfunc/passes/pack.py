"""Pack: which copies stay between two uses, under the budget of live bytes.

The span between two uses of a bucket is a reuse interval; keeping it saves one gather and occupies
the bucket's bytes meanwhile. Choosing which to keep is an interval packing over the whole step,
forward and backward alike (Belady's farthest-next-use rule is optimal only for equal sizes). Values
derived from leaves are packed first: a kept one spares gathering its leaves. Then every use is made
real: gather and wait before the first use of a run, recipes followed, free after the last use.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from zfunc.errors import BudgetError, explain
from zfunc.passes.buckets import BUCKET_BYTES, buckets
from zfunc.passes.intervals import Interval, pack
from zfunc.passes.live import grad_bytes, staging_bytes
from zfunc.passes.live import live_bytes as live_bytes_of
from zfunc.program.ir import (
    Collective,
    Compute,
    Free,
    Gather,
    Op,
    Program,
    Value,
    Wait,
    map_refs,
    reads,
    writes,
)

__all__ = ["pack_reuse"]


def pack_reuse(
    program: Program,
    axis_sizes: Mapping[str, int],
    *,
    live_bytes: int | None,
    floor_bytes: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    leaf_order: Sequence[int] | None = None,
) -> Program:
    """Replaces virtual leaves and recipes by copies with a beginning and an end.

    Args:
        program: a program after `derive`.
        axis_sizes: the sizes of the mesh's axes.
        live_bytes: the budget; None means `floor_bytes`, or what is needed if that is more.
        floor_bytes: the budget that is used when none is given.
        bucket_bytes: see `buckets`.
        leaf_order: see `buckets`.

    Returns:
        A program in which every read value exists when it is read.

    Raises:
        BudgetError: some op needs more than `live_bytes` by itself.
    """
    grouped = buckets(program.leaves, program.ops, program.derived, bucket_bytes, leaf_order)
    demand = _Demand(program, axis_sizes, grouped)
    enough = floor_bytes if live_bytes is None else live_bytes
    if demand.most() > enough:
        enough = _feasible(demand, axis_sizes, live_bytes, floor_bytes)
    kept_derived = demand.pack_derived(enough)
    kept_buckets = demand.pack_buckets(enough, kept_derived)
    packed = _Emitter(demand, kept_derived, kept_buckets).run()
    return dataclasses.replace(packed, limit_bytes=enough)


def _feasible(
    demand: _Demand, axis_sizes: Mapping[str, int], live_bytes: int | None, floor_bytes: int
) -> int:
    """The budget, once the program that keeps nothing was written out and fits it."""
    least = _Emitter(demand, *demand.keep_nothing()).run()
    during = live_bytes_of(least.ops, least.values, least.leaves, axis_sizes)
    needed = max(during, default=0)
    if live_bytes is None:
        return max(floor_bytes, needed)
    if needed > live_bytes:
        raise _too_small(least, during.index(needed), needed, live_bytes)
    return live_bytes


Run = tuple[int, int]


class _Demand:
    """What each op needs resident: buckets and derived values, directly or to follow a recipe."""

    def __init__(
        self,
        program: Program,
        axis_sizes: Mapping[str, int],
        grouped: Sequence[tuple[int, ...]],
    ):
        self.program = program
        self.axis_sizes = axis_sizes
        self.leaf_of = {leaf.full: i for i, leaf in enumerate(program.leaves)}
        self.buckets = [group for group in grouped if not program.leaves[group[0]].resident]
        self.bucket_of = {leaf: b for b, group in enumerate(self.buckets) for leaf in group}
        self.bytes = [sum(program.leaves[i].spec.nbytes for i in group) for group in self.buckets]
        self.staging = [
            sum(staging_bytes(program.leaves[i], axis_sizes) for i in group)
            for group in self.buckets
        ]
        self._roots: dict[int, frozenset[int]] = {}
        self._inside: dict[int, frozenset[int]] = {}
        self._close()
        self.direct: list[frozenset[int]] = []
        self.items: list[frozenset[int]] = []
        for op in program.ops:
            needs = [self.resolve(value) for value in reads(op)]
            self.direct.append(frozenset(b for b, _ in needs if b is not None))
            self.items.append(frozenset(d for _, d in needs if d is not None))
        self.grads = grad_bytes(program)
        self.base = [self.base_bytes(i, self.accessed(i)) for i in range(len(program.ops))]

    def resolve(self, value: int) -> tuple[int | None, int | None]:
        """The bucket, or the derived value with storage of its own, behind a virtual value."""
        owner = self.program.values[value].owner
        if owner in self.leaf_of:
            return self.bucket_of.get(self.leaf_of[owner]), None
        return None, owner if owner in self.program.derived else None

    def roots(self, item: int) -> frozenset[int]:
        """The buckets that a recipe needs, through everything that it derives on the way."""
        return self._roots[item]

    def transient(self, item: int) -> int:
        """Bytes of the derived values that a recipe makes on its way."""
        return sum(self.program.values[other].nbytes for other in self._inside[item])

    def _close(self) -> None:
        """Finds what every recipe needs, through the recipes that it reads; they come first."""
        for item, op in self.program.derived.items():
            buckets: set[int] = set()
            others: set[int] = set()
            for bucket, other in map(self.resolve, reads(op)):
                if bucket is not None:
                    buckets.add(bucket)
                if other is not None and other != item:
                    buckets |= self._roots[other]
                    others |= {other, *self._inside[other]}
            self._roots[item] = frozenset(buckets)
            self._inside[item] = frozenset(others - {item})

    def accessed(self, at: int, kept: Iterable[int] = ()) -> frozenset[int]:
        """The buckets that must be resident at an op when `kept` items need no derivation."""
        missing = self.items[at].difference(kept)
        return self.direct[at].union(*(self.roots(item) for item in missing))

    def base_bytes(self, at: int, accessed: frozenset[int]) -> int:
        """Live bytes at an op when nothing is kept from before."""
        items = self.items[at]
        values = self.program.values
        return (
            sum(self.bytes[b] for b in accessed)
            + max((self.staging[b] for b in accessed), default=0)
            + sum(values[item].nbytes for item in items)
            + max((self.transient(item) for item in items), default=0)
            + self.grads[at]
        )

    def most(self) -> int:
        """No less than what a program needs that keeps nothing."""
        return max(self.base, default=0)

    def keep_nothing(self) -> tuple[dict[int, list[Run]], dict[int, list[Run]]]:
        """The runs of the program that needs least: everything is made anew for each use."""
        derived: dict[int, list[Run]] = {}
        gathered: dict[int, list[Run]] = {}
        for at, items in enumerate(self.items):
            for item in sorted(items):
                derived.setdefault(item, []).append((at, at))
            for bucket in sorted(self.accessed(at)):
                gathered.setdefault(bucket, []).append((at, at))
        return derived, gathered

    def pack_derived(self, live_bytes: int) -> dict[int, list[Run]]:
        """Chooses the spans over which derived values are kept; returns each one's runs."""
        uses: dict[int, list[int]] = {}
        for at, items in enumerate(self.items):
            for item in sorted(items):
                uses.setdefault(item, []).append(at)
        capacity = [live_bytes - base for base in self.base]
        sizes = {item: self.program.values[item].nbytes for item in uses}
        gains = {item: sum(self.bytes[b] for b in self.roots(item)) + sizes[item] for item in uses}
        return _runs(uses, sizes, gains, capacity)

    def pack_buckets(self, live_bytes: int, derived: dict[int, list[Run]]) -> dict[int, list[Run]]:
        """Chooses the spans over which gathered copies are kept; returns each bucket's runs."""
        continued: dict[int, set[int]] = {}
        occupied = [0] * (len(self.program.ops) + 1)
        for item, runs in derived.items():
            for start, stop in runs:
                for at in range(start + 1, stop + 1):
                    if item in self.items[at]:
                        continued.setdefault(at, set()).add(item)
                    else:
                        occupied[at] += self.program.values[item].nbytes
        uses: dict[int, list[int]] = {}
        capacity = []
        for at in range(len(self.program.ops)):
            accessed = self.accessed(at, continued.get(at, ()))
            capacity.append(live_bytes - self.base_bytes(at, accessed) - occupied[at])
            for bucket in sorted(accessed):
                uses.setdefault(bucket, []).append(at)
        sizes = dict(enumerate(self.bytes))
        return _runs(uses, sizes, sizes, capacity)


def _runs(
    uses: Mapping[int, Sequence[int]],
    sizes: Mapping[int, int],
    gains: Mapping[int, int],
    capacity: list[int],
) -> dict[int, list[Run]]:
    """Packs the reuse intervals of some items and joins the kept ones to runs.

    Where the capacity is negative, only what is made anew for the op, one thing after the other,
    is known to fit: nothing is kept up to there or from there on.
    """
    spans = [
        (k, a, b)
        for k, at in uses.items()
        for a, b in itertools.pairwise(at)
        if min(capacity[a], capacity[b]) >= 0
    ]
    room = [max(free, 0) for free in capacity]
    kept = pack([Interval(a, b, sizes[k], gains[k]) for k, a, b in spans], room)
    joined = {(k, a) for i, (k, a, _) in enumerate(spans) if i in kept}
    runs: dict[int, list[Run]] = {}
    for k, at in uses.items():
        start = at[0]
        for here, after in zip(at, [*at[1:], -1], strict=True):
            if (k, here) not in joined or after < 0:
                runs.setdefault(k, []).append((start, here))
                start = after
    return runs


class _Emitter:
    """Writes the program out with real copies in place of virtual values."""

    def __init__(self, demand: _Demand, derived: dict[int, list[Run]], kept: dict[int, list[Run]]):
        self.demand = demand
        self.program = demand.program
        self.values = list(demand.program.values)
        self.ops: list[Op] = []
        self.real: dict[int, int] = {}
        self.held: dict[int, set[int]] = {}
        self.token = 1 + max(
            (op.token for op in self.program.ops if isinstance(op, Wait)), default=-1
        )
        self.begins, self.ends = _edges(kept)
        self.item_begins, self.item_ends = _edges(derived)

    def run(self) -> Program:
        for at, op in enumerate(self.program.ops):
            for bucket in self.begins.get(at, ()):
                self._gather(bucket)
            for item in self.item_begins.get(at, ()):
                self._derive(item)
            done = self.ends.get(at, ())
            self._free(self._bucket_values(b) for b in done if b not in self.demand.direct[at])
            self.ops.append(self._real(op))
            self._free([item] for item in self.item_ends.get(at, ()))
            self._free(self._bucket_values(b) for b in done if b in self.demand.direct[at])
        return dataclasses.replace(
            self.program, ops=tuple(self.ops), values=tuple(self.values), derived={}
        )

    def _bucket_values(self, bucket: int) -> list[int]:
        return [self.program.leaves[i].full for i in self.demand.buckets[bucket]]

    def _gather(self, bucket: int) -> None:
        leaves = self.demand.buckets[bucket]
        outs = []
        for i in leaves:
            leaf = self.program.leaves[i]
            fresh = Value(leaf.path, leaf.spec, len(self.values), leaf.spec.nbytes, "copy")
            outs.append(fresh.owner)
            self.values.append(fresh)
            self._hold(leaf.full, fresh.owner, leaf.full)
        axis = self.program.leaves[leaves[0]].layouts.params.axis
        assert axis is not None
        self.ops += [Gather(axis, leaves, tuple(outs), self.token), Wait(self.token)]
        self.token += 1

    def _hold(self, virtual: int, real: int, owner: int) -> None:
        self.real[virtual] = real
        self.held.setdefault(owner, set()).add(virtual)

    def _derive(self, item: int) -> None:
        """Follows the recipe of an item; what it derives on the way is freed at once."""
        passing: list[int] = []
        self._follow(item, passing)
        self._free([other] for other in passing if other != item)

    def _follow(self, value: int, passing: list[int]) -> int:
        """The real value of a virtual one, derived now if it does not exist."""
        derived, waiting = self.program.derived, [value]
        while waiting:
            top = waiting[-1]
            missing = []
            if top in derived and top not in self.real:
                missing = [r for r in reads(derived[top]) if r in derived and r not in self.real]
                if not missing:
                    self._follow_recipe(derived[top], passing)
            if missing:
                waiting.extend(reversed(missing))
            else:
                waiting.pop()
        return self.real.get(value, value)

    def _follow_recipe(self, op: Compute, passing: list[int]) -> None:
        """Writes out one recipe, whose sources exist."""
        names = {read: self.real.get(read, read) for read in reads(op)}
        outs: list[int | None] = []
        for out in op.outs:
            if out is None:
                outs.append(None)
                continue
            fresh, old = len(self.values), self.values[out]
            owner = old.owner
            real_owner = fresh if owner == out else self.real.get(owner, owner)
            self.values.append(dataclasses.replace(old, owner=real_owner, role=self._role(old)))
            self._hold(out, fresh, owner)
            if owner == out:
                passing.append(out)
            outs.append(fresh)
        self.ops.append(
            dataclasses.replace(
                op,
                args=map_refs(op.args, names.__getitem__),
                kwargs=map_refs(op.kwargs, names.__getitem__),
                outs=tuple(outs),
            )
        )

    def _role(self, value: Value) -> str:
        owner = self.real.get(value.owner, value.owner)
        return self.values[owner].role if owner != value.owner else value.role

    def _real(self, op: Op) -> Op:
        """An op with every virtual value that it reads replaced by a real one."""
        names = {value: self._follow(value, []) for value in reads(op)}
        if isinstance(op, Compute):
            for out in writes(op):
                value = self.values[out]
                if value.owner in self.real:
                    self.values[out] = dataclasses.replace(value, owner=self.real[value.owner])
            return dataclasses.replace(
                op,
                args=map_refs(op.args, names.__getitem__),
                kwargs=map_refs(op.kwargs, names.__getitem__),
            )
        if isinstance(op, Collective):
            return dataclasses.replace(op, source=names[op.source])
        return op

    def _free(self, groups: Iterable[Sequence[int]]) -> None:
        """Ends copies and derived values, and forgets the views of them."""
        for owners in groups:
            owners = [owner for owner in owners if owner in self.real]
            if owners:
                self.ops.append(Free(tuple(self.real[owner] for owner in owners)))
            for owner in owners:
                for virtual in self.held.pop(owner, set()):
                    self.real.pop(virtual, None)


def _edges(runs: Mapping[int, list[Run]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The items whose runs begin, and end, at each position."""
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for item in runs:
        for start, stop in runs[item]:
            begins.setdefault(start, []).append(item)
            ends.setdefault(stop, []).append(item)
    return begins, ends


def _too_small(program: Program, at: int, needed: int, limit: int) -> BudgetError:
    """Names the op at which even a program that keeps nothing needs most, and its largest leaf."""
    alive: dict[int, Value] = {}
    for op in program.ops[: at + 1]:
        for value in writes(op):
            owner = program.values[value].owner
            if program.values[owner].role in ("copy", "derived", "grad"):
                alive[owner] = program.values[owner]
        for value in op.values if isinstance(op, Free) else ():
            alive.pop(program.values[value].owner, None)
    path = max(alive.values(), key=lambda v: v.nbytes).name if alive else "its receive buffers"
    computes = [op for op in program.ops[at:] if isinstance(op, Compute)]
    name = str(computes[0].target) if computes else type(program.ops[at]).__name__
    return BudgetError(
        explain(
            f"live_bytes is too small for {name}, which needs {path}",
            expected=f"at least {needed} bytes",
            got=f"{limit} bytes",
            do=f"use Prefetch(live_bytes={needed}) or more, or split the leaf",
        ),
        needed_bytes=needed,
        limit_bytes=limit,
        path=path,
        op=name,
    )
