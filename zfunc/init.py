"""Init: from a tree, or files, or a function that makes one, to this rank's pieces.

A function is traced once and its ops are run in order; each leaf is cut and dropped as soon as
nothing reads it any more. So the full model never exists on one rank, and a draw is what it would
be if the function were run as it is.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc import tree
from zfunc.agree import Proposal, agree, hash_of, spelled, telling_others
from zfunc.capture import Argument, compat, to_program, trace_forward
from zfunc.capture.slots import Input
from zfunc.checkpoint import Stored, read, shapes_of
from zfunc.errors import LayoutError, explain
from zfunc.execute import Executor, Inputs
from zfunc.layout import ShapeDtype
from zfunc.masters import cut_master
from zfunc.meshes import Mesh
from zfunc.params import ParamTable, checksum, compare_checksums, cut
from zfunc.program.ir import Free, Program, reads, writes
from zfunc.programs import takes_key
from zfunc.random import split
from zfunc.scaling import fresh_scaler
from zfunc.sharded import Sharded, is_sharded
from zfunc.state import State
from zfunc.training import Training
from zfunc.update import init_opt_state

__all__ = ["Pieces", "abstract_state", "cut_tree", "init_state", "run_init", "traced_init"]


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """What a rank cuts out of whole leaves, in canonical order.

    Attributes:
        leaves: its piece of each.
        masters: its piece of the master of each, where there is one.
        sums: a checksum of each whole leaf, to compare with those of other ranks.
    """

    leaves: list[Sharded]
    masters: list[Sharded | None]
    sums: list[int]


def cut_tree(params: Any, table: ParamTable, mesh: Mesh) -> Pieces:
    """Cuts a tree that every rank holds whole, or reads leaf by leaf."""
    leaves = [leaf for leaf in tree.leaves(params) if isinstance(leaf, Tensor | Stored)]
    pieces = Pieces([], [], [])
    for leaf, slot in zip(leaves, table.slots, strict=True):
        full = read(leaf)
        pieces.leaves.append(cut(full, slot, mesh))
        pieces.masters.append(cut_master(full, slot, mesh))
        if mesh.comm is not None:
            pieces.sums.append(checksum(full))
    return pieces


def traced_init(init_fn: Callable[..., Any], key: Tensor | None) -> tuple[Program, Any]:
    """Traces a function that makes parameters.

    Args:
        init_fn: `init_fn(key)` if it takes a parameter, else `init_fn()`.
        key: int64 [2], or None.

    Returns:
        Its program, and the tree that it returns with `ShapeDtype` in place of tensors.

    Raises:
        LayoutError: it takes a key and there is none.
    """
    by_name = takes_key(init_fn)
    wants_key = by_name or _num_parameters(init_fn) > 0
    if wants_key and key is None:
        raise LayoutError(
            explain(
                "the init function takes a key, and there is none",
                do="call init(..., key=zfunc.random.key(seed))",
            )
        )
    slots = (Input(ShapeDtype((2,), torch.int64), (1,), torch.device("cpu")),) if wants_key else ()
    args = Argument(tree.structure((0,) if wants_key else ()), slots)

    def function(_: Any, *keys: Tensor) -> Any:
        return init_fn(key=keys[0]) if by_name else init_fn(*keys)

    traced = trace_forward(function, Argument(tree.structure(None), ()), args, pure=False)
    program = to_program(traced, getattr(init_fn, "__name__", "init"))
    specs = iter(program.values[value].spec for value in program.micros[0].aux)
    leaves = [next(specs) if leaf is None else leaf for leaf in traced.statics]
    return program, tree.unflatten(traced.aux, leaves)


def run_init(program: Program, key: Tensor | None, table: ParamTable, mesh: Mesh) -> Pieces:
    """Runs a traced init function; every leaf is cut as soon as it is complete."""
    executor = Executor(program, mesh, max_segment_ops=1)
    outputs = program.micros[0].aux
    done_after = _completion(program)
    inputs = [key] if program.micros[0].inputs else []
    frame = executor.bind(Inputs([], [inputs], [None]))  # pyright: ignore
    made: dict[int, Sharded] = {}
    masters: dict[int, Sharded | None] = {}
    sums: dict[int, int] = {}
    for at, item in enumerate([None, *executor.schedule]):
        if item is not None:
            executor.perform(frame, item)
            if frame.error is not None:
                raise frame.error
        complete = done_after.get(at - 1, ())
        for position in complete:
            full = frame.env[outputs[position]]
            slot = table.slots[position]
            made[position], masters[position] = cut(full, slot, mesh), cut_master(full, slot, mesh)
            sums[position] = checksum(full) if mesh.comm is not None else 0
            del full
        executor.free(frame, Free(tuple(outputs[position] for position in complete)))
    order = range(len(outputs))
    return Pieces([made[i] for i in order], [masters[i] for i in order], [sums[i] for i in order])


def _completion(program: Program) -> dict[int, list[int]]:
    """Which outputs are complete after each op: nothing uses their storage any more."""
    owner = [value.owner for value in program.values]
    last: dict[int, int] = {}
    for at, op in enumerate(program.ops):
        for value in (*reads(op), *writes(op)):
            last[owner[value]] = at
    done: dict[int, list[int]] = {}
    for position, value in enumerate(program.micros[0].aux):
        done.setdefault(last.get(owner[value], -1), []).append(position)
    return done


def _num_parameters(function: Callable[..., Any]) -> int:
    """How many arguments a function must be given by position."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def init_state(training: Training, params_or_fn: Any, tx: Any, key: Tensor | None) -> State:
    """Makes the first state of a step; see `Step.init`."""
    mesh = training.mesh
    with telling_others(mesh, "init"):
        init_key, state_key = (None, None) if key is None else split(key)
        if callable(params_or_fn):
            program, like = traced_init(params_or_fn, init_key)
        else:
            program, like = None, shapes_of(params_or_fn)
            _check_whole(params_or_fn)
        options = training.options
        table = ParamTable.of(like, mesh, options.specs, options.trainable, options.precision)
        about = f"{spelled(tx)}\nkey: {None if key is None else key.tolist()}\n{table.facts}"
    agree(mesh, Proposal(bytes(16), hash_of(about), lambda: about), "init")
    pieces: Pieces | Exception
    try:
        if program is None:
            pieces = cut_tree(params_or_fn, table, mesh)
        else:
            pieces = run_init(program, init_key, table, mesh)
    except Exception as error:
        pieces = error
    sums = pieces.sums if isinstance(pieces, Pieces) else pieces
    compare_checksums(sums, [slot.path for slot in table.slots], mesh)
    assert isinstance(pieces, Pieces)
    opt_state = init_opt_state(tx, table, pieces.leaves, pieces.masters)
    zero = torch.zeros((), dtype=torch.int64)
    scaler = fresh_scaler(options.loss_scale)
    return State(zero, table.rebuild(pieces.leaves), opt_state, state_key, scaler, tx)


def _check_whole(params: Any) -> None:
    """Raises `LayoutError` for a leaf that is no whole tensor."""
    leaves = tree.leaves(params, is_leaf=is_sharded)
    for path, leaf in zip(tree.leaf_paths(params, is_leaf=is_sharded), leaves, strict=True):
        if isinstance(leaf, Sharded | ShapeDtype) or (isinstance(leaf, Tensor) and leaf.is_meta):
            raise LayoutError(
                explain(
                    f"{path} cannot be cut by init",
                    expected="a tensor that every rank holds whole",
                    got=repr(leaf),
                    do="pass whole tensors, such as zfunc.gather(params); for shapes use abstract",
                )
            )


def abstract_state(training: Training, params_or_fn: Any, tx: Any, key: Tensor | None) -> State:
    """The state that `init_state` would make, of `ShapeDtype` leaves."""
    mesh, options = training.mesh, training.options
    init_key, state_key = (None, None) if key is None else split(key)
    like = (
        traced_init(params_or_fn, init_key)[1]
        if callable(params_or_fn)
        else shapes_of(params_or_fn)
    )
    table = ParamTable.of(like, mesh, options.specs, options.trainable, options.precision)
    with compat.fake_mode():
        leaves = [
            Sharded(
                torch.empty(slot.layouts.params.local_shape, dtype=slot.dtypes.stored),
                slot.layouts.params,
            )
            for slot in table.slots
        ]
        opt_state = init_opt_state(tx, table, leaves)
        zero = torch.zeros((), dtype=torch.int64)
        scaler = fresh_scaler(options.loss_scale)
        state = State(zero, table.rebuild(leaves), opt_state, state_key, scaler, tx)
        return tree.map(_abstract, state)


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return ShapeDtype(tuple(leaf.shape), leaf.dtype)
    return leaf
