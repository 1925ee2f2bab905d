"""Derive: what depends on leaves alone belongs to its leaves.

A cast, transpose, norm or stack of parameters that is read in forward and again in backward would
keep a second model alive between the two. Such ops leave the op list and become recipes
(`Program.derived`), which `pack` follows again at each use, or once for a use that it decides to
keep. Equal recipes are one value. What is much smaller than its source (a sum of squares, say)
stays an ordinary op: it is cheap to keep and would else call for all its leaves at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import torch

from zfunc.program.ir import Compute, Op, Program, map_refs, reads, writes

__all__ = ["SMALL", "derive"]

SMALL = 8


def derive(program: Program) -> Program:
    """Moves ops that depend on leaves alone into `Program.derived`.

    Args:
        program: a program whose compute ops read virtual leaf values.

    Returns:
        An equal program; roles of derived values are "derived".
    """
    return _Derivation(program).run()


class _Derivation:
    def __init__(self, program: Program):
        self.program = program
        self.values = list(program.values)
        self.leaves = frozenset(leaf.full for leaf in program.leaves)
        self.pure = set(self.leaves)
        self.neutral: dict[int, Compute] = {}
        self.derived: dict[int, Compute] = {}
        self.same: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.known: dict[Any, tuple[int | None, ...]] = {}
        self.fixed = self._fixed_owners()

    def run(self) -> Program:
        ops: list[Op] = []
        for op in self.program.ops:
            if isinstance(op, Compute):
                op = self._renamed(op)
                if self._is_neutral(op):
                    self.neutral |= dict.fromkeys(writes(op), op)
                elif self._is_pure(op):
                    if not self._is_small(op):
                        self._take(op)
                        continue
                    self.pure.update(writes(op))
            ops.append(op)
        return dataclasses.replace(
            self.program,
            ops=_without_unread(ops, self.neutral),
            values=tuple(self.values),
            derived=self.derived,
        )

    def _fixed_owners(self) -> set[int]:
        """Owners that must stay ordinary values: written in place, or outputs of the program."""
        owner = [value.owner for value in self.program.values]
        fixed: set[int] = set()
        for op in self.program.ops:
            if not isinstance(op, Compute):
                fixed.update(owner[value] for value in reads(op))
            elif getattr(op.target, "_schema").is_mutable:  # noqa: B009
                fixed.update(owner[value] for value in (*reads(op), *writes(op)))
        for micro in self.program.micros:
            ends = (micro.loss, micro.weight, *micro.grads, *micro.aux)
            fixed.update(owner[value] for value in ends if value is not None)
        return fixed - self.leaves

    def _renamed(self, op: Compute) -> Compute:
        if not any(value in self.same for value in reads(op)):
            return op

        def new(value: int) -> int:
            return self.same.get(value, value)

        return dataclasses.replace(op, args=map_refs(op.args, new), kwargs=map_refs(op.kwargs, new))

    def _is_fixed(self, op: Compute) -> bool:
        tags = getattr(op.target, "tags", ())
        return torch.Tag.nondeterministic_seeded in tags or any(
            self.values[value].owner in self.fixed for value in writes(op)
        )

    def _is_free(self, value: int) -> bool:
        """Whether a value depends on nothing but Python values."""
        return value in self.neutral or value in self.program.constants

    def _is_neutral(self, op: Compute) -> bool:
        """Depends on nothing but Python values."""
        return not self._is_fixed(op) and all(map(self._is_free, reads(op)))

    def _is_pure(self, op: Compute) -> bool:
        """Depends on at least one leaf, and on nothing but leaves and Python values."""
        if self._is_fixed(op):
            return False
        sources = reads(op)
        pure = [value in self.pure for value in sources]
        return any(pure) and all(
            known or self._is_free(value) for known, value in zip(pure, sources, strict=True)
        )

    def _is_small(self, op: Compute) -> bool:
        """Whether an op's results are much smaller than what it reads, or view such a result.

        What is made of such results alone, and is no larger, is as cheap to keep.
        """
        made = [self.values[value] for value in writes(op)]
        bases = {value.owner for value in made} - set(writes(op))
        if bases:
            return not all(self._is_recipe(self.same.get(base, base)) for base in bases)
        read = max(self.values[value].spec.nbytes for value in reads(op))
        nbytes = sum(value.nbytes for value in made)
        if not any(self._is_recipe(value) for value in reads(op)):
            return nbytes <= read
        return nbytes * SMALL <= read

    def _is_recipe(self, value: int) -> bool:
        return value in self.derived or value in self.leaves

    def _take(self, op: Compute) -> None:
        """Makes an op a recipe, or finds that it is one already."""
        key = (op.target, _frozen(op.args), _frozen(op.kwargs))
        known = self.known.get(key)
        if known is not None and _covers(known, op.outs):
            for old, new in zip(op.outs, known, strict=True):
                if old is not None and new is not None:
                    self.same[old] = new
            return
        self.known[key] = op.outs
        self._add_recipe(op)

    def _add_recipe(self, op: Compute) -> None:
        """Enters an op into `derived`, with recipes for the Python-only values that it reads."""
        op = dataclasses.replace(
            op,
            args=map_refs(op.args, self._recipe_of),
            kwargs=map_refs(op.kwargs, self._recipe_of),
            phase="derive",
            regions=(),
        )
        for out in writes(op):
            self.derived[out] = op
            self.pure.add(out)
            value = self.values[out]
            owner = self._recipe_of(self.same.get(value.owner, value.owner))
            role = "derived" if owner == out else self.values[owner].role
            self.values[out] = dataclasses.replace(value, owner=owner, role=role)

    def _recipe_of(self, value: int) -> int:
        """The value by which recipes call a Python-only value; any other value is called itself."""
        if value not in self.neutral:
            return value
        if value not in self.copies:
            self._copy_neutral(value)
        return self.copies[value]

    def _copy_neutral(self, value: int) -> None:
        """Makes recipes of the ops that a Python-only value comes from, in their order."""
        wanted: set[int] = set()
        waiting = [value]
        while waiting:
            found = waiting.pop()
            if found in self.neutral and found not in self.copies and found not in wanted:
                wanted.add(found)
                waiting.extend(reads(self.neutral[found]))
        for found in [made for made in self.neutral if made in wanted]:
            if found in self.copies:
                continue
            source = self.neutral[found]
            for out in writes(source):
                self.copies[out] = len(self.values)
                owner = self.copies.get(self.values[out].owner, self.copies[out])
                self.values.append(dataclasses.replace(self.values[out], owner=owner))
            outs = tuple(None if out is None else self.copies[out] for out in source.outs)
            self._add_recipe(dataclasses.replace(source, outs=outs))


def _covers(known: tuple[int | None, ...], outs: tuple[int | None, ...]) -> bool:
    """Whether a recipe makes all the results that another op is read for."""
    return all(has is not None or out is None for has, out in zip(known, outs, strict=True))


def _frozen(args: Any) -> Any:
    """A hashable form of an argument structure."""
    if isinstance(args, tuple | list):
        return (type(args).__name__, *(_frozen(item) for item in args))
    if isinstance(args, dict):
        return tuple((key, _frozen(value)) for key, value in args.items())
    if isinstance(args, float | complex):
        return repr(args)  # 0.0 and -0.0 compare equal
    return (type(args).__name__, args)


def _without_unread(ops: list[Op], optional: Container[int]) -> tuple[Op, ...]:
    """Drops the ops that only make optional values which no other op reads."""
    kept: list[Op] = []
    needed: set[int] = set()
    for op in reversed(ops):
        made = writes(op)
        if made and all(value in optional and value not in needed for value in made):
            continue
        needed.update(reads(op))
        kept.append(op)
    return tuple(reversed(kept))
