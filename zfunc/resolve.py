"""Resolve: ranks whose programs communicate differently find one sequence that serves all.

What every rank states is exchanged, so all come to the same conclusion: the union of their
programs if it is not much longer than the longest and fits every budget, else the program that
gathers all leaves first, else one error everywhere. A resolution is remembered by what all ranks
proposed, so a pattern that returns costs a lookup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from zfunc.agree import Agreement, exchange_facts
from zfunc.errors import BudgetError, ProgramMismatchError, explain
from zfunc.meshes import Mesh
from zfunc.passes import stages
from zfunc.passes.buckets import first_uses
from zfunc.passes.live import live_bytes
from zfunc.passes.union import (
    Unit,
    grads_done,
    merge_all,
    merge_units,
    units,
    with_ghosts,
    with_weight,
    with_zero_grads,
)
from zfunc.passes.whole import whole_program
from zfunc.program.ir import Collective, Program
from zfunc.programs import Compiled, Programs

__all__ = ["resolve"]

_LONGEST = 1.5

Kept = TypeVar("Kept")
Told = TypeVar("Told")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Resolution:
    """What all ranks settled on; compared by identity.

    Attributes:
        leaf_order: the leaves that some rank uses, in an order that suits all.
        grads: the leaves for which some rank has a gradient, in the order of the backward passes.
        weighted: whether some rank's loss has a weight; then all count theirs.
        merged: the common sequence; None for the program that gathers all leaves first.
    """

    leaf_order: tuple[int, ...]
    grads: tuple[int, ...]
    weighted: bool
    merged: tuple[Unit, ...] | None


_WHOLE = _Resolution((), (), False, None)


def resolve(
    programs: Programs, own: Compiled, proposed: Agreement, facts: str, what: str, *, update: bool
) -> Compiled:
    """Finds the program that this rank runs when ranks captured different ones.

    Args:
        programs: the cache of the function.
        own: what this rank captured.
        proposed: what every rank captured.
        facts: a hash of the parameters, equal on all ranks.
        what: the call, for messages.
        update: whether an optimizer update follows.

    Returns:
        This rank's computation under a sequence of collectives that all ranks share.

    Raises:
        BudgetError: neither way fits every rank.
        ProgramMismatchError: the functions' own collectives differ.
        RemoteRankError: another rank failed.
    """
    # Which rank proposed what makes no difference. All ranks look up the same keys in the same
    # order, so they forget, and negotiate, alike.
    key = (facts, frozenset(zip(proposed.digests, proposed.patterns, strict=True)), update)
    agreed: _Resolution | None = programs.agreed.get(key)
    program: Program | None = None
    if agreed is None:
        agreed, program = _negotiate(programs, own, what, update)
        programs.agreed.put(key, agreed)
    # A rank may have forgotten what others still know: whoever has to build it again may fail.
    compiled, _ = _telling(
        programs, what, lambda: (_found_or_built(programs, own, agreed, program, update), None)
    )
    return compiled


def _telling(
    programs: Programs, what: str, make: Callable[[], tuple[Kept, Told]]
) -> tuple[Kept, list[Told]]:
    """Keeps one part of what is made and tells all ranks the other; gives what all ranks told.

    Whatever can fail between two exchanges belongs in `make`, so that no rank waits for another
    that has given up.

    Raises:
        RemoteRankError: another rank failed to make it (this rank raises its own error).
    """
    try:
        kept, told = make()
    except Exception as error:
        exchange_facts(programs.mesh, error, what)
        raise
    return kept, exchange_facts(programs.mesh, told, what)


def _found_or_built(
    programs: Programs, own: Compiled, agreed: _Resolution, program: Program | None, update: bool
) -> Compiled:
    """This rank's computation under what ranks settled on; `program` if it was just made."""
    found: Compiled | None = programs.resolved.get((own, agreed))
    if found is None:
        if program is None:
            program = _united(programs, own, agreed, update)
        found = own.with_program(program, programs.mesh)
        programs.resolved.put((own, agreed), found)
    return found


def _united(programs: Programs, own: Compiled, agreed: _Resolution, update: bool) -> Program:
    if agreed.merged is None:
        return _whole(programs, own, update)
    return with_ghosts(_packed(programs, own, agreed, update), agreed.merged)


def _negotiate(
    programs: Programs, own: Compiled, what: str, update: bool
) -> tuple[_Resolution, Program]:
    """Exchanges what ranks use, then their sequences; every rank comes to the same result."""
    _, rows = _telling(programs, what, lambda: (None, _facts(own)))
    (agreed, packed), sequences = _telling(
        programs, what, lambda: _sequence(programs, own, rows, what, update)
    )
    if None not in sequences:
        num_asks = len(rows[0]["asks"])
        (united, program), fits = _telling(
            programs, what, lambda: _union(programs, agreed, packed, sequences, num_asks)
        )
        if program is not None and all(fits):
            return united, program
    program, needed = _telling(programs, what, lambda: _try_whole(programs, own, update))
    if program is None or any(needed):
        raise _over_budget(programs, needed, what)
    return _WHOLE, program


def _sequence(
    programs: Programs, own: Compiled, rows: Sequence[dict[str, Any]], what: str, update: bool
) -> tuple[tuple[_Resolution, Program | None], list[Unit] | None]:
    """What ranks settled on so far, and this rank's sequence under it; None if there is none."""
    _check_alike(rows, what)
    order, grads = (
        tuple(dict.fromkeys(merge_all([row[key] for row in rows]))) for key in ("order", "grads")
    )
    agreed = _Resolution(order, grads, any(row["weighted"] for row in rows), None)
    if not all(row["traced"] for row in rows):
        return (agreed, None), None
    try:
        packed = _packed(programs, own, agreed, update)
    except BudgetError:
        return (agreed, None), None
    return (agreed, packed), units(packed)


def _union(
    programs: Programs,
    agreed: _Resolution,
    packed: Program | None,
    told: Sequence[list[Unit] | None],
    num_asks: int,
) -> tuple[tuple[_Resolution, Program | None], bool]:
    """The common sequence, this rank's program with it, and whether that may be used."""
    assert packed is not None
    sequences = [sequence for sequence in told if sequence is not None]
    merged = tuple(merge_units(sequences))
    united = dataclasses.replace(agreed, merged=merged)
    # No rank can take part in a collective of the function that it does not make itself.
    same = sum(unit.kind == "ask" for unit in merged) == num_asks
    if not same or len(merged) > _LONGEST * max(map(len, sequences)):
        return (united, None), False
    program = with_ghosts(packed, merged)
    return (united, program), _fits(program, programs.mesh)


def _over_budget(programs: Programs, needed: Sequence[int], what: str) -> BudgetError:
    """The error of every rank if the program that gathers all does not fit on one."""
    rank = needed.index(max(needed))
    limit = programs.prefetch.live_bytes
    limit = programs.mesh.hw.device_bytes // 4 if limit is None else limit
    return BudgetError(
        explain(
            f"{what}: ranks read different leaves, and neither what all of them read nor all "
            "parameters and gradients whole fit into the budget of every rank",
            expected=f"live_bytes of at least {needed[rank]} on rank {rank}",
            got=limit,
            do="raise Prefetch(live_bytes=), or let all ranks read the same leaves",
        ),
        needed_bytes=needed[rank],
        limit_bytes=limit,
        op="gather of all leaves",
    )


def _check_alike(rows: Sequence[dict[str, Any]], what: str) -> None:
    """Raises `ProgramMismatchError` where no sequence could serve all ranks."""
    problems = {
        "asks": (
            "the functions' own collectives differ between ranks",
            "call gather and scatter inside the function on every rank alike",
        ),
        "given": (
            "the Sharded leaves of other arguments differ between ranks",
            "pass the same leaves on every rank, whether it reads them or not",
        ),
    }
    for key, (problem, do) in problems.items():
        first = rows[0][key]
        for rank, row in enumerate(rows):
            if row[key] != first:
                raise ProgramMismatchError(
                    explain(
                        f"{what}: {problem}",
                        expected=f"rank 0: {first}",
                        got=f"rank {rank}: {row[key]}",
                        do=do,
                    )
                )


def _facts(own: Compiled) -> dict[str, Any]:
    """What a rank states about its captured function."""
    asks = [
        (op.name, op.axis, op.shape)
        for micro in own.micros
        for op in micro.ops
        if isinstance(op, Collective)
    ]
    given = [
        (leaf.path, str(leaf.spec), str(leaf.layouts.params.spec))
        for micro in own.micros
        for leaf in micro.leaves
        if not leaf.is_param
    ]
    done = [grads_done(micro) for micro in own.micros]
    return {
        "traced": own.rung == "traced",
        "asks": asks,
        "given": given,
        "order": list(dict.fromkeys(_uses(own.micros))),
        "grads": merge_all([sorted(each, key=each.__getitem__) for each in done]),
        "weighted": any(micro.micros[0].weight is not None for micro in own.micros),
    }


def _uses(micros: Sequence[Program]) -> Iterator[int]:
    """Leaves in the order of first use; those of arguments follow the parameters, as in a step."""
    offset = 0
    for micro in micros:
        for leaf in first_uses(micro.leaves, micro.ops, {}):
            yield leaf if micro.leaves[leaf].is_param else leaf + offset
        offset += sum(not leaf.is_param for leaf in micro.leaves)


def _packed(programs: Programs, own: Compiled, agreed: _Resolution, update: bool) -> Program:
    """The rank's program with agreed buckets and gradients, every collective awaited at once."""
    micros = own.micros
    if micros[0].mode != "forward":
        micros = tuple(with_zero_grads(micro, agreed.grads) for micro in micros)
    if agreed.weighted:
        micros = tuple(with_weight(micro) for micro in micros)
    built = dict(
        stages(
            micros,
            programs.mesh,
            update=update,
            live_bytes=programs.prefetch.live_bytes,
            ahead_bytes=0,
            leaf_order=agreed.leaf_order,
            grad_order=agreed.grads,
        )
    )
    return built["pack"]


def _fits(program: Program, mesh: Mesh) -> bool:
    """Whether a union keeps this rank's budget."""
    during = live_bytes(program.ops, program.values, program.leaves, dict(mesh.axes))
    return max(during, default=0) <= (program.limit_bytes or 0)


def _whole(programs: Programs, own: Compiled, update: bool) -> Program:
    return whole_program(
        own.micros, programs.mesh, update=update, live_bytes=programs.prefetch.live_bytes
    )


def _try_whole(programs: Programs, own: Compiled, update: bool) -> tuple[Program | None, int]:
    """The program that gathers all leaves first; else what it needs, which is more than it may."""
    try:
        return _whole(programs, own, update), 0
    except BudgetError as error:
        return None, error.needed_bytes
