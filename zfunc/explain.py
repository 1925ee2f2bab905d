"""Explain: what a step did with its loss, as a value that prints as a short report."""

from __future__ import annotations

import dataclasses

from zfunc.program.ir import Compute, Gather, Program
from zfunc.programs import Compiled, Programs

__all__ = ["Explanation", "SignatureReport", "explain_programs"]


@dataclasses.dataclass(frozen=True, slots=True)
class SignatureReport:
    """One captured signature.

    Attributes:
        rung: "traced" or "dynamic".
        derivation: "vjp", or "autograd" where functorch refused the loss; "forward" without one.
        num_ops: ops of the program.
        capture_s: seconds of capture and passes.
        kept: leaves that are gathered once and stay until their last use.
        gathered_again: leaf -> number of gathers, where more than one.
        num_recomputed: ops that `remat` runs a second time.
        limit_bytes: the budget of live bytes.
    """

    rung: str
    derivation: str
    num_ops: int
    capture_s: float
    kept: tuple[str, ...]
    gathered_again: dict[str, int]
    num_recomputed: int
    limit_bytes: int

    def __str__(self) -> str:
        again = sum(self.gathered_again.values()) - len(self.gathered_again)
        return (
            f"{self.rung} ({self.derivation}) in {self.capture_s:.2f} s: {self.num_ops} ops, "
            f"{self.num_recomputed} recomputed; {len(self.kept)} leaves gathered once, "
            f"{len(self.gathered_again)} gathered {again} times more under {self.limit_bytes} bytes"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What `Step.explain` returns.

    Attributes:
        name: the name of the function.
        signatures: one report per program in the cache.
        hits: calls that found their program.
        misses: calls that captured one.
    """

    name: str
    signatures: tuple[SignatureReport, ...]
    hits: int
    misses: int

    def __str__(self) -> str:
        head = f"{self.name}: {self.misses} captured, {self.hits} calls found their program"
        return "\n".join([head, *(f"  {report}" for report in self.signatures)])


def explain_programs(programs: Programs) -> Explanation:
    """Reports on a cache of programs."""
    reports = tuple(_report(compiled) for compiled in programs.compiled)
    return Explanation(programs.name, reports, programs.hits, programs.misses)


def _report(compiled: Compiled) -> SignatureReport:
    program = compiled.program
    counts = _gather_counts(program)
    recomputed = sum(isinstance(op, Compute) and op.phase == "recompute" for op in program.ops)
    return SignatureReport(
        compiled.rung,
        compiled.traced[0].derivation if compiled.traced else "autograd",
        len(program.ops),
        compiled.seconds,
        tuple(path for path, count in counts.items() if count == 1),
        {path: count for path, count in counts.items() if count > 1},
        recomputed,
        program.limit_bytes or 0,
    )


def _gather_counts(program: Program) -> dict[str, int]:
    counts: dict[str, int] = {}
    for op in program.ops:
        if isinstance(op, Gather):
            for leaf in op.leaves:
                path = program.leaves[leaf].path
                counts[path] = counts.get(path, 0) + 1
    return counts
