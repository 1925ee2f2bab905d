"""Do two programs compute the same? Values get names that say how they were computed.

The name of a value is its operator with the names of what it read, so it survives renumbering,
moving to recipes and deriving again. An in-place write changes the name under which a storage is
read from then on; a random op is named by the draw that it makes or repeats. Two programs are the
same if each micro-batch performs the same ops on the same names in the same order, and if outputs
and gradients have the same names. Ops that read leaves and constants only may move, vanish or
repeat: they count through whoever reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from zfunc.program.ir import (
    Accumulate,
    Call,
    Collective,
    Compute,
    Program,
    Reduce,
    Ref,
    Rng,
    Status,
    reads,
    refs,
    writes,
)

__all__ = ["CheckError", "Names", "check_same_computation"]

Name = tuple[str, int]


class CheckError(AssertionError):
    """A program breaks a rule."""


class Names:
    """Programs with their names, so that a row of passes is named once each."""

    def __init__(self) -> None:
        self._table: dict[Any, int] = {}
        self._known: dict[int, tuple[Program, _Naming]] = {}

    def of(self, program: Program) -> _Naming:
        """The names of a program; the same names mean the same in all of them."""
        if id(program) not in self._known:
            self._known[id(program)] = program, _Naming(program, self._table)
        return self._known[id(program)][1]


def check_same_computation(
    after: Program,
    before: Program | Sequence[Program],
    *,
    united: bool = False,
    names: Names | None = None,
) -> None:
    """Raises `CheckError` unless a pass kept the computation.

    Args:
        after: what the pass returned.
        before: what it was given: one program, or the captured program of each micro-batch.
        united: whether `after` may add zeros to gradients, for the sake of other ranks.
        names: those of programs that were compared before.
    """
    names = Names() if names is None else names
    new = names.of(after)
    if not isinstance(before, Program):
        olds = [names.of(one) for one in before]
        for number, old in enumerate(olds):
            _compare(new, number, old, 0)
        _check_gradients(new, olds, united)
        return
    old = names.of(before)
    if len(before.micros) != len(after.micros):
        raise CheckError("the number of micro-batches differs")
    for number in range(len(after.micros)):
        _compare(new, number, old, number)
    if old.gradients != new.gradients and old.gradients:
        raise CheckError("the gradients that the status sees differ")


def _compare(new: _Naming, number: int, old: _Naming, old_number: int) -> None:
    done, wanted = new.sequence.get(number, []), old.sequence.get(old_number, [])
    for place, (one, other) in enumerate(zip(done, wanted, strict=False)):
        if one != other:
            raise CheckError(
                f"op {place} of micro-batch {number} differs: {new.show(one)} for {new.show(other)}"
            )
    if len(done) != len(wanted):
        raise CheckError(f"micro-batch {number} has {len(done)} ops for {len(wanted)}")
    for what in ("loss", "weight", "aux"):
        one, other = new.outputs[number][what], old.outputs[old_number][what]
        # A loss without a weight counts once where others have weights.
        if one != other and not (what == "weight" and other is None and one in new.ones):
            raise CheckError(f"the {what} of micro-batch {number} differs")


def _check_gradients(new: _Naming, olds: Sequence[_Naming], united: bool) -> None:
    """Every gradient of every micro-batch is summed once over every axis, the last axis first."""
    if not any(isinstance(op, Status) for op in new.program.ops):
        return
    for leaf in new.program.leaves:
        if not leaf.trainable:
            continue
        mesh = leaf.layouts.params.mesh
        axes = tuple(axis for axis in reversed([*mesh.axes]) if mesh.axes[axis] > 1)
        wanted = Counter(
            (number, old.grads[leaf.path], axes)
            for number, old in enumerate(olds)
            if leaf.path in old.grads
        )
        found = new.gradients[leaf.path]
        if united:
            found, wanted = (
                Counter({term: n for term, n in terms.items() if term[1] not in new.zeros})
                for terms in (found, wanted)
            )
        if found != wanted:
            raise CheckError(
                f"the gradient of {leaf.path} is not the sum over {axes} of all micro-batches"
            )


class _Naming:
    """The names of all values of a program, and the order of its ops.

    Attributes:
        sequence: per micro-batch the names of its forward and backward ops, in order.
        outputs: per micro-batch the names of loss, weight and aux.
        grads: per leaf path the name of the first micro-batch's gradient.
        gradients: per leaf path what the status op sees: of each summand the micro-batch, the name
            and the axes that it was summed over.
        zeros: the names of tensors of zeros.
        ones: the names of the number one.
    """

    def __init__(self, program: Program, table: dict[Any, int]):
        self.program = program
        self.table = table
        self.owner = [value.owner for value in program.values]
        self.names: dict[int, Name] = {}
        self.versions: Counter[int] = Counter()
        self.draws: Counter[int] = Counter()
        self.slots: dict[int, tuple[int, int]] = {}
        self.replayed: int | None = None
        self.pending: int | None = None
        self.sequence: dict[int, list[int]] = {}
        self.micros: dict[int, int] = {}
        self.summands: dict[int, Counter[Any]] = {}
        self.gradients: dict[str, Counter[Any]] = {}
        self.zeros: set[int] = set()
        self.ones: set[int] = set()
        self._name_given()
        for op in program.ops:
            self._op(op)
        self.outputs = [
            {
                "loss": self._optional(micro.loss),
                "weight": self._optional(micro.weight),
                "aux": [self._read(value) for value in micro.aux],
            }
            for micro in program.micros
        ]
        first = program.micros[0].grads if program.micros else ()
        self.grads = {
            leaf.path: self._read(grad)
            for leaf, grad in zip(program.leaves, first, strict=False)
            if grad is not None
        }

    def show(self, name: int) -> str:
        """What an interned name stands for."""
        return str(next(key for key, number in self.table.items() if number == name))

    def _intern(self, *key: Any) -> int:
        return self.table.setdefault(key, len(self.table))

    def _name_given(self) -> None:
        for leaf in self.program.leaves:
            self.names[leaf.full] = ("leaf", self._intern("leaf", leaf.path))
        for value, tensor in self.program.constants.items():
            content = (str(tensor.dtype), tuple(tensor.shape), str(tensor.flatten().tolist()))
            self.names[value] = ("leaf", self._intern("constant", content))
        for micro in self.program.micros:
            for place, value in enumerate(micro.inputs):
                self.names[value] = ("made", self._intern("input", place))
            if micro.key is not None:
                self.names[micro.key] = ("made", self._intern("key"))

    def _optional(self, value: int | None) -> int | None:
        return None if value is None else self._read(value)

    def _read(self, value: int) -> int:
        """The name of what a value holds now."""
        return self._intern("read", self._name(value)[1], self.versions[self.owner[value]])

    def _name(self, value: int) -> Name:
        if value not in self.names:
            op = self.program.derived.get(value)
            if op is None:
                raise CheckError(f"v{value} is read but does not exist")
            self._compute(op)
        return self.names[value]

    def _op(self, op: Any) -> None:
        if isinstance(op, Compute):
            self._compute(op)
        elif isinstance(op, Rng):
            self._rng(op)
        elif isinstance(op, Collective):
            key = ("collective", op.name, op.axis, op.shape, self._read(op.source))
            self._make(op.micro, self._intern(*key), (op.out,), record=True)
        elif isinstance(op, Call):
            key = self._intern("call", *map(self._read, reads(op)))
            self._make(op.micro, key, writes(op), record=True)
        elif isinstance(op, Reduce):
            for value, out in zip(op.ins, op.outs, strict=True):
                terms = self._summands(value).items()
                self.summands[out] = Counter({(m, n, (*a, op.axis)): c for (m, n, a), c in terms})
        elif isinstance(op, Accumulate):
            for into, value in zip(op.into, op.ins, strict=True):
                self.summands[into] = self._summands(into) + self._summands(value)
        elif isinstance(op, Status):
            trainable = [leaf for leaf in self.program.leaves if leaf.trainable]
            for leaf, grad in zip(trainable, op.grads, strict=True):
                self.gradients[leaf.path] = Counter() if grad is None else self._summands(grad)
        else:
            for i, out in zip(getattr(op, "leaves", ()), writes(op), strict=False):
                self.names[out] = self.names[self.program.leaves[i].full]

    def _compute(self, op: Compute) -> None:
        sources = list(reads(op))
        names = [self._name(value) for value in sources]
        draw = self._draw(op)
        fixed = draw is None and all(kind == "leaf" for kind, _ in names)
        key = self._intern(str(op.target), draw, self._freeze((op.args, op.kwargs)))
        recorded = not fixed and op.phase not in ("recompute", "derive")
        self._make(op.micro, key, op.outs, record=recorded, fixed=fixed)
        if op.target is torch.ops.aten.zeros.default:
            self.zeros.update(map(self._read, writes(op)))
        if op.target is torch.ops.aten.ones.default and op.args == ([],):
            self.ones.update(map(self._read, writes(op)))
        for value in _written(op):
            self.versions[self.owner[value]] += 1

    def _make(self, micro: int, key: int, outs: Any, *, record: bool, fixed: bool = False) -> None:
        if record:
            self.sequence.setdefault(micro, []).append(key)
        for place, out in enumerate(outs):
            if out is not None:
                self.names[out] = ("leaf" if fixed else "made", self._intern("out", key, place))
                self.micros[out] = micro

    def _summands(self, value: int) -> Counter[Any]:
        """What a gradient is the sum of; one that was computed is its own only summand."""
        if value in self.summands:
            return self.summands[value]
        return Counter([(self.micros.get(value), self._read(value), ())])

    def _draw(self, op: Compute) -> int | None:
        """Which draw of its micro-batch a random op makes, or makes again."""
        if torch.Tag.nondeterministic_seeded not in getattr(op.target, "tags", ()):
            return None
        if self.replayed is not None:
            micro, number = self.slots.get(self.replayed, (-1, -1))
            return number if micro == op.micro else -1
        number = self.draws[op.micro]
        self.draws[op.micro] += 1
        if self.pending is not None:
            self.slots[self.pending], self.pending = (op.micro, number), None
        return number

    def _rng(self, op: Rng) -> None:
        if op.action == "record":
            self.pending = op.slot
        else:
            self.replayed = op.slot if op.action == "replay" else None

    def _freeze(self, args: Any) -> Any:
        if isinstance(args, Ref):
            return self._read(args.id)
        if isinstance(args, tuple | list):
            return (type(args).__name__, *map(self._freeze, args))
        if isinstance(args, dict):
            return tuple((key, self._freeze(value)) for key, value in args.items())
        return (type(args).__name__, str(args))


def _written(op: Compute) -> tuple[int, ...]:
    """The values that an op writes in place, by its schema."""
    schema = getattr(op.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    named = {argument.name: argument for argument in schema.arguments}
    given = list(zip(schema.arguments, op.args, strict=False))
    given += [(named[key], value) for key, value in op.kwargs]
    return tuple(
        value
        for argument, arg in given
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in refs(arg)
    )
