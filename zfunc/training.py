"""One call of a step: prepare, agree, run, commit, report.

Everything that can fail is done before the commit point; until then the state that was passed in is
valid on every rank. The functions here take a `Training` (a loss, a mesh and options) explicitly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc import optim, tree
from zfunc.agree import (
    Agreement,
    Proposal,
    agree,
    check_real,
    exchange_failures,
    hash_of,
    naming,
    raise_failures,
    spelled,
    telling_others,
)
from zfunc.capture import Argument, describe, refuse_shapes
from zfunc.dynamic import call_loss
from zfunc.errors import LayoutError, NonFiniteError, explain
from zfunc.execute import Inputs, Outcome, Verdict, deferred_interrupts
from zfunc.masters import separated
from zfunc.meshes import Mesh
from zfunc.metrics import mean_loss, measured, nonfinite_message, warn_of_skips
from zfunc.params import ParamTable, leaf_facts
from zfunc.program.ir import Program, Status
from zfunc.programs import Compiled, Programs
from zfunc.random import fold_in
from zfunc.resolve import resolve
from zfunc.scaling import LossScale, Scaler, advanced, check_scaler, scale_of
from zfunc.settings import Options
from zfunc.sharded import Sharded, is_sharded
from zfunc.state import Memo, State, check_state
from zfunc.update import Updated, check_opt_state, commit, opt_state_like, renew

__all__ = ["Prepared", "Training", "gradients", "prepare", "run_step"]

_MAX_TABLES = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """A loss on a mesh under options, with the programs captured so far."""

    mesh: Mesh
    options: Options
    programs: Programs
    tables: dict[Any, ParamTable]
    opt_structures: dict[ParamTable, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    def table(self, params: Any, structure: Any) -> ParamTable:
        """The description of a parameter tree, made once per structure."""
        if structure not in self.tables:
            options = self.options
            made = ParamTable.of(
                params, self.mesh, options.specs, options.trainable, options.precision
            )
            self.tables[structure] = made
            if len(self.tables) > _MAX_TABLES:
                forgotten = self.tables.pop(next(iter(self.tables)))
                self.opt_structures.pop(forgotten, None)
                self.programs.forget(forgotten)
        return self.tables[structure]

    def check_opt_state(self, table: ParamTable, state: State) -> None:
        """Raises `LayoutError` unless an optimizer's state is what this step would make."""
        known = self.opt_structures.get(table)
        if known is None or known[0] is not state.tx:
            known = self.opt_structures[table] = state.tx, opt_state_like(state.tx, table)
        check_opt_state(state.opt_state, known[1])

    @property
    def threads(self) -> int:
        """Threads of native kernels: as many as torch uses for one operator."""
        return torch.get_num_threads()


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is ready to run.

    Attributes:
        table: the parameters.
        leaves: their `Sharded` leaves.
        compiled: the program.
        batches: the micro-batches as given.
        pieces: this rank's piece of every leaf of the program.
        tensors: per micro-batch its tensors, pieces of `Sharded` arguments among them.
        keys: per micro-batch its folded key, or None.
    """

    table: ParamTable
    leaves: list[Sharded]
    compiled: Compiled
    batches: list[Any]
    pieces: list[Tensor]
    tensors: list[list[Any]]
    keys: list[Tensor | None]


def run_step(training: Training, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
    """Runs one training step; see `Step.__call__`."""
    mesh, options = training.mesh, training.options
    with telling_others(mesh, "step"):
        check_real(mesh)
        check_state(state)
        refuse_shapes([state.step], state=state)
        number = int(state.step)
        what = f"step {number}"
    box: dict[str, Any] = {}

    def update(grads: list[Tensor | None], verdict: Verdict) -> None:
        if verdict.nonfinite and options.nonfinite != "ignore":
            return
        box["updated"] = commit(
            state,
            ready.table,
            ready.leaves,
            grads,
            verdict,
            mesh=mesh,
            donate=options.donate,
            threads=training.threads,
            what=what,
        )

    with naming(what), deferred_interrupts() as interrupts:
        with telling_others(mesh, what), interrupts.heard():
            check_scaler(options.loss_scale, state.scaler)
            scale = scale_of(options.loss_scale, state.scaler)
            ready = prepare(training, state.params, batch, state.key, number, state=state)
            context = ("step", number, state.tx, options.nonfinite, options.loss_scale, scale)
            proposal = _proposal(training, ready, context)
        ready = _resolved(training, ready, agree(mesh, proposal, what), what, update=True)
        outcome, verdict = _run(training, ready, update, state.key, number, what, scale)
        if "updated" not in box and options.nonfinite == "raise":
            mean = float(mean_loss(ready.compiled.program, outcome, verdict))
            raise NonFiniteError(nonfinite_message(ready.table, verdict, mean, what))
        scaler, updated = state.scaler, box.get("updated")
        if isinstance(options.loss_scale, LossScale):
            scaler = advanced(options.loss_scale, scaler, finite=updated is not None)
        new, applied = _next_state(training, state, ready, verdict, updated, scaler, what)
        program = ready.compiled.program
        metrics = measured(program, outcome, verdict, applied, skipped=updated is None, scale=scale)
        if options.has_aux:
            metrics["aux"] = _aux(training, ready.compiled, outcome)
        return new, metrics


def gradients(training: Training, params: Any, batch: Any, key: Tensor | None) -> tuple[Any, Any]:
    """The global mean loss (with aux) and the gradients; see `Step.value_and_grad`."""
    mesh, what = training.mesh, "value_and_grad"
    with naming(what), deferred_interrupts() as interrupts:
        with telling_others(mesh, what), interrupts.heard():
            check_real(mesh)
            ready = prepare(training, params, batch, key, 0)
            proposal = _proposal(training, ready, (what,))
        ready = _resolved(training, ready, agree(mesh, proposal, what), what, update=False)
        scale = scale_of(training.options.loss_scale, None)
        outcome, verdict = _run(training, ready, None, key, 0, what, scale)
    table, program = ready.table, ready.compiled.program
    sums = _reduced(program)
    grads = []
    for position, value in zip(table.trainable, sums, strict=True):
        layout = table.slots[position].layouts.grads
        if value is None:
            shape = layout.local_shape
            dtype = program.leaves[position].reduced_dtype
            local = torch.zeros(shape, dtype=dtype, device=mesh.device)
        else:
            local = outcome.env[value].view(layout.local_shape)
        grads.append(Sharded(local, layout))
    loss = mean_loss(program, outcome, verdict)
    value = (loss, _aux(training, ready.compiled, outcome)) if training.options.has_aux else loss
    return value, table.trainable_tree(grads)


def prepare(
    training: Training,
    params: Any,
    batch: Any,
    key: Tensor | None,
    number: int,
    *,
    state: State | None = None,
    keys: bool = True,
) -> Prepared:
    """Describes the arguments, finds or captures the program, folds the key.

    Raises:
        LayoutError: a leaf, batch or key does not fit; names it.
        CaptureError: the loss cannot be captured.
        BudgetError: the byte budget is too small.
    """
    mesh, options = training.mesh, training.options
    table, leaves = known_leaves(training, params, state)
    batches = [batch]
    if options.accum > 1:
        if not isinstance(batch, list | tuple) or len(batch) != options.accum:
            raise LayoutError(
                explain(
                    f"batch must be a list of accum={options.accum} micro-batches",
                    expected=f"{options.accum} of them",
                    got=len(batch) if isinstance(batch, list | tuple) else type(batch),
                    do="pass [batch_0, batch_1, ...]; their shapes may differ",
                )
            )
        batches = list(batch)
    arguments: list[Argument] = []
    given: list[list[Any]] = []
    dynamic = training.programs.is_dynamic(table)
    for one in batches:
        argument, found = describe(one, "batch", mesh.device, static=not dynamic)
        arguments.append(argument)
        given.append(found)
    compiled = training.programs.loss(
        table,
        arguments,
        update=state is not None,
        has_aux=options.has_aux,
        scaled=options.loss_scale is not None,
    )
    if compiled.rung == "dynamic":
        given = [[] for _ in batches]
    folded: list[Tensor | None] = [None] * options.accum
    if keys:
        folded = _fold_keys(training, key, number)
    sharded = [one for found in given for one in found if isinstance(one, Sharded)]
    pieces = [leaf.local for leaf in (*leaves, *sharded)]
    tensors = [[getattr(one, "local", one) for one in found] for found in given]
    if keys:
        refuse_shapes([*pieces, *itertools.chain(*tensors)], params=params, batch=batch)
    return Prepared(table, leaves, compiled, batches, pieces, tensors, folded)


def known_leaves(
    training: Training, params: Any, state: State | None
) -> tuple[ParamTable, list[Sharded]]:
    """The table and leaves of a state; remembered by the state that a step made."""
    if state is not None and state.memo is not None:
        known = state.memo
        if known.fits(training, state, *tree.flatten(params, is_leaf=is_sharded)):
            return known.table, known.leaves
    structure = tree.structure(params)
    table = training.table(params, (structure, leaf_facts(params)))
    leaves = table.leaves_of(params)
    if state is not None:
        training.check_opt_state(table, state)
    return table, leaves


def _fold_keys(training: Training, key: Tensor | None, number: int) -> list[Tensor | None]:
    """One key per micro-batch: folded with the step, this rank's index and the micro-batch."""
    accum = training.options.accum
    if not training.programs.takes_key:
        return [None] * accum
    if key is None:
        raise LayoutError(
            explain(
                "the loss takes a key, and the state has none",
                do="call init(..., key=zfunc.random.key(seed)), or value_and_grad(..., key=)",
            )
        )
    own = _own_key(training, key, number)
    return [fold_in(own, micro) for micro in range(accum)]


def _own_key(training: Training, key: Tensor, number: int) -> Tensor:
    """This rank's key for one step."""
    return fold_in(fold_in(key, number), training.mesh.rank)


def _proposal(training: Training, ready: Prepared, context: tuple[Any, ...]) -> Proposal:
    facts = {
        "call": context,
        "leaves": ready.table.facts_hash,
        "mesh": tuple(training.mesh.axes.items()),
        "accum": training.options.accum,
    }
    return Proposal(
        ready.compiled.digest,
        hash_of(facts),
        lambda: "\n".join([*(f"{k}: {spelled(v)}" for k, v in facts.items()), ready.table.facts]),
        ready.compiled.pattern,
    )


def _resolved(
    training: Training, ready: Prepared, proposed: Agreement, what: str, *, update: bool
) -> Prepared:
    """The same call, under a program that goes with those of the other ranks."""
    if proposed.alike:
        return ready
    facts = ready.table.facts_hash
    compiled = resolve(training.programs, ready.compiled, proposed, facts, what, update=update)
    return dataclasses.replace(ready, compiled=compiled)


def _run(
    training: Training,
    ready: Prepared,
    update: Callable[[list[Tensor | None], Verdict], None] | None,
    key: Tensor | None,
    number: int,
    what: str,
    scale: float,
) -> tuple[Outcome, Verdict]:
    """Runs the program; raises on every rank if any rank failed before the commit point."""
    mesh = training.mesh
    given = ready.tensors
    if training.options.loss_scale is not None and ready.compiled.rung == "traced":
        start = torch.tensor(scale, dtype=torch.float64, device=mesh.device)
        given = [[*tensors, start] for tensors in given]
    inputs = Inputs(
        ready.pieces,
        given,
        ready.keys,
        update,
        lambda fulls, micro: call_loss(
            training.programs.function,
            ready.table,
            fulls,
            [ready.batches[micro]],
            ready.keys[micro],
            has_aux=training.options.has_aux,
            scale=scale,
        ),
        training.threads,
        scale,
    )
    with _seeded(training, ready.compiled, key, number):
        outcome = ready.compiled.executor.run(inputs)
    verdict = outcome.verdict
    assert verdict is not None
    if verdict.failed_ranks:
        messages = exchange_failures(mesh, outcome.error, what)
        if outcome.error is not None:
            raise outcome.error
        raise_failures(list(verdict.failed_ranks), messages, what)
    return outcome, verdict


@contextlib.contextmanager
def _seeded(
    training: Training, compiled: Compiled, key: Tensor | None, number: int
) -> Iterator[None]:
    """With a key, operators that draw from the global generator draw from one seeded by it."""
    if key is None or not compiled.draws:
        yield
        return
    words = _own_key(training, key, number).tolist()
    device = training.mesh.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(words[0] << 31 ^ words[1])
        yield


def _next_state(
    training: Training,
    state: State,
    ready: Prepared,
    verdict: Verdict,
    updated: Updated | None,
    scaler: Scaler | None,
    what: str,
) -> tuple[State, Any]:
    """The state after the step, and the rate and norm of its update."""
    options, skips = training.options, 0
    if updated is None:
        leaves, opt_state = renew(state, ready.leaves, donate=options.donate, what=what)
        applied = optim.Applied(optim.learning_rate_of(state.tx, separated(opt_state)[1]), None)
        skips = 1 + (0 if state.memo is None else state.memo.skips)
        warn_of_skips(training.mesh, ready.table, verdict, skips, what)
    else:
        leaves, opt_state, applied = updated.params, updated.opt_state, updated.applied
    params = ready.table.rebuild(leaves)
    flat, structure = tree.flatten(params, is_leaf=is_sharded)
    memo = Memo(training, ready.table, list(leaves), flat, structure, opt_state, state.tx, skips)
    step = state.step + 1
    return State(step, params, opt_state, state.key, scaler, state.tx, memo), applied


def _aux(training: Training, compiled: Compiled, outcome: Outcome) -> Any:
    each = [compiled.aux(outcome, m) for m in range(training.options.accum)]
    return each if training.options.accum > 1 else each[0]


def _reduced(program: Program) -> Sequence[int | None]:
    """The values of the reduced gradients, as the status op names them."""
    return next(op.grads for op in program.ops if isinstance(op, Status))
