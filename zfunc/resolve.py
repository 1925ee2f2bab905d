"""Resolve: ranks whose programs communicate differently find one sequence that serves all.

What every rank states is exchanged, so all come to the same conclusion: the union of their
programs if it is not much longer than the longest and fits every budget, else the program that
gathers all leaves first, else one error everywhere. A resolution is remembered by what all ranks
proposed, so a pattern that returns costs a lookup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from zfunc.agree import Agreement, exchange_facts
from zfunc.errors import BudgetError, ProgramMismatchError, explain
from zfunc.passes import stages
from zfunc.passes.buckets import first_uses
from zfunc.passes.live import live_bytes
from zfunc.passes.union import (
    Unit,
    grads_done,
    merge_all,
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
    if agreed is None:
        agreed = _negotiate(programs, own, what, update)
        programs.agreed.put(key, agreed)
    compiled: Compiled | None = programs.resolved.get((own, agreed))
    failure: Exception | None = None
    if compiled is None:
        try:
            compiled = _united(programs, own, agreed, update)
            programs.resolved.put((own, agreed), compiled)
        except Exception as error:
            failure = error
    # A rank may have forgotten what others still know: whoever has to build it again may fail.
    exchange_facts(programs.mesh, failure, what)
    assert compiled is not None
    return compiled


def _united(programs: Programs, own: Compiled, agreed: _Resolution, update: bool) -> Compiled:
    """This rank's computation under what ranks settled on."""
    if agreed.merged is None:
        program = _whole(programs, own, update)
    else:
        program = with_ghosts(_packed(programs, own, agreed, update), agreed.merged)
    return own.with_program(program, programs.mesh)


def _negotiate(programs: Programs, own: Compiled, what: str, update: bool) -> _Resolution:
    """Exchanges what ranks use, then their sequences; every rank comes to the same result."""
    mesh = programs.mesh
    rows = exchange_facts(mesh, _stated(own), what)
    _check_alike(rows, what)
    order, grads = (
        tuple(dict.fromkeys(_merged([row[key] for row in rows]))) for key in ("order", "grads")
    )
    agreed = _Resolution(order, grads, any(row["weighted"] for row in rows), None)
    if all(row["traced"] for row in rows):
        sequences = exchange_facts(mesh, _try_units(programs, own, agreed, update), what)
        if None not in sequences:
            merged = tuple(_merged(sequences))
            longest = max(map(len, sequences))
            # No rank can take part in a collective of the function that it does not make itself.
            same = sum(unit.kind == "ask" for unit in merged) == len(rows[0]["asks"])
            fits = (
                same
                and len(merged) <= _LONGEST * longest
                and _fits(programs, own, dataclasses.replace(agreed, merged=merged), update)
            )
            if all(exchange_facts(mesh, fits, what)):
                return dataclasses.replace(agreed, merged=merged)
    _check_whole(programs, own, what, update)
    return _WHOLE


def _merged(sequences: Sequence[list[Any]]) -> list[Any]:
    """One sequence that contains each, whatever rank it is of."""
    return merge_all(sorted(sequences))


def _check_whole(programs: Programs, own: Compiled, what: str, update: bool) -> None:
    """Raises `BudgetError` on every rank if the program that gathers all does not fit on one."""
    needed = exchange_facts(programs.mesh, _bytes_short(programs, own, update), what)
    if not any(needed):
        return
    rank = needed.index(max(needed))
    limit = programs.prefetch.live_bytes
    limit = programs.mesh.hw.device_bytes // 4 if limit is None else limit
    raise BudgetError(
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


def _stated(own: Compiled) -> dict[str, Any] | Exception:
    try:
        return _facts(own)
    except Exception as error:
        return error


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
        )
    )
    return built["pack"]


def _try_units(
    programs: Programs, own: Compiled, agreed: _Resolution, update: bool
) -> list[Unit] | Exception | None:
    try:
        return units(_packed(programs, own, agreed, update))
    except BudgetError:
        return None
    except Exception as error:
        return error


def _fits(programs: Programs, own: Compiled, agreed: _Resolution, update: bool) -> bool | Exception:
    """Whether the union keeps this rank's budget."""
    assert agreed.merged is not None
    try:
        program = with_ghosts(_packed(programs, own, agreed, update), agreed.merged)
    except Exception as error:
        return error
    sizes = dict(programs.mesh.axes)
    during = live_bytes(program.ops, program.values, program.leaves, sizes)
    return max(during, default=0) <= (program.limit_bytes or 0)


def _whole(programs: Programs, own: Compiled, update: bool) -> Program:
    return whole_program(
        own.micros, programs.mesh, update=update, live_bytes=programs.prefetch.live_bytes
    )


def _bytes_short(programs: Programs, own: Compiled, update: bool) -> int | Exception:
    """What the program that gathers all leaves first needs, if it does not fit; else 0."""
    try:
        _whole(programs, own, update)
    except BudgetError as error:
        return error.needed_bytes
    except Exception as error:
        return error
    return 0
