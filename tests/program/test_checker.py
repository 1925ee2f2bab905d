"""The checker accepts correct programs and finds every kind of broken one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.checker import check, check_same_collectives, check_stage, live_bytes
from tests.equivalence import CheckError, check_same_computation
from tests.programs import Draft, aten, capture, draft_step, mlp_loss
from zfunc.layout import zero
from zfunc.passes import stages
from zfunc.passes.remat import rematerialise
from zfunc.program.ir import (
    Accumulate,
    Compute,
    Free,
    Gather,
    Micro,
    Op,
    Program,
    Reduce,
    Rng,
    Wait,
    reads,
    writes,
)
from zfunc.rematerialise import remat

Edit = Callable[[list[Op]], Any]


def _edited(program: Program, edit: Edit) -> Program:
    ops = list(program.ops)
    result = edit(ops)
    return dataclasses.replace(program, ops=tuple(ops if result is None else result))


def _swapped(one: int, other: int) -> Edit:
    def edit(ops: list[Op]) -> None:
        ops[one], ops[other] = ops[other], ops[one]

    return edit


def _changed(at: int, **fields: Any) -> Edit:
    def edit(ops: list[Op]) -> None:
        ops[at] = dataclasses.replace(ops[at], **fields)

    return edit


def _inserted(at: int, op: Op) -> Edit:
    return lambda ops: ops.insert(at, op)


def _without(*which: int) -> Edit:
    return lambda ops: [op for at, op in enumerate(ops) if at not in which]


def test_a_correct_step_passes() -> None:
    check(draft_step(), budget_bytes=160, before=draft_step())


SPARE = Gather("shard", (1,), (13,), 7)

# Op numbers are those in the docstring of `draft_step`.
BROKEN: dict[str, tuple[Edit, str]] = {
    "gather missing": (_without(0, 1), "does not exist"),
    "wait missing": (_without(1), "before wait #0"),
    "last wait missing": (_without(14), "in flight"),
    "wait too late": (_swapped(4, 5), "before wait #1"),
    "waited twice": (_inserted(2, Wait(0)), "was awaited before"),
    "waited without issue": (_inserted(2, Wait(9)), "was never issued"),
    "token issued twice": (_changed(2, token=0), "issued twice"),
    "never awaited": (lambda ops: ops[:3], "never awaited"),
    "gather across the update": (
        lambda ops: [*ops[:16], SPARE, *ops[16:], Wait(7), Free((13,))],
        "overlaps #7",
    ),
    "freed too early": (_swapped(6, 5), "after its storage"),
    "freed twice": (_inserted(7, Free((4,))), "freed twice"),
    "free of an input": (_inserted(7, Free((2,))), "was not made"),
    "copy never freed": (_without(6), "a copy, is never freed"),
    "gradient never freed": (_without(15), "a grad, is never freed"),
    "freed in flight": (_swapped(14, 15), "freed while in flight"),
    "gathered copy freed in flight": (_inserted(3, Free((4,))), "freed while in flight"),
    "sum read in flight": (_swapped(14, 16), "before wait #3"),
    "written twice": (lambda ops: ops.insert(4, ops[3]), "written twice"),
    "wrong leaf": (_changed(0, leaves=(1,)), "no copy of"),
    "wrong axis": (_changed(0, axis="replica"), "not cut over"),
    "sum of the wrong size": (_changed(13, outs=(13, 12), leaves=(1, 0)), "size of the sum"),
    "update before status": (_swapped(16, 17), "does not follow"),
    "no update": (_without(17), "with 0 updates"),
    "two statuses": (lambda ops: ops.insert(16, ops[16]), "second status"),
    "leaf not updated": (_changed(17, leaves=(0,)), "every trainable leaf"),
    "replay of nothing": (_inserted(3, Rng("replay", 0)), "not recorded"),
    "restore outside": (_inserted(3, Rng("restore", 0)), "outside of a replay"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_kind_of_broken_step_is_found(name: str) -> None:
    edit, message = BROKEN[name]
    with pytest.raises(CheckError, match=message):
        check(_edited(draft_step(), edit))


def test_the_budget_is_checked_at_every_op() -> None:
    with pytest.raises(CheckError, match="op 11 Compute: 160 live bytes exceed the budget of 159"):
        check(draft_step(), budget_bytes=159)
    with pytest.raises(CheckError, match="exceed the budget of 100"):
        check(draft_step(limit=100))


def _in_place(role: str, *, phase: str = "forward", in_flight: bool = False) -> Program:
    """Writes in place into a storage of some role."""
    d = Draft()
    w = d.leaf("params['w']", (4,))
    x = d.value((4,), "input")
    made = x if role == "input" else d.value((4,), role)
    if role == "copy":
        d.ops += [Gather("shard", (w,), (made,), 0), Wait(0)]
    elif role != "input":
        d.compute(aten.neg.default, x, out=made)
    total = d.value((2,), "shard")
    if in_flight:
        d.ops.append(Reduce("shard", (w,), (made,), (total,), True, 1, 8))
    d.compute(aten.neg_.default, made, out=d.value((4,), role, of=made), phase=phase)
    if in_flight:
        d.ops.append(Wait(1))
    if role not in ("input", "activation"):
        d.ops.append(Free((made,)))
    return d.program(Micro((x,), None, None, None, (None,), ()), mode="forward")


@pytest.mark.parametrize("role", ["input", "copy", "derived"])
def test_what_others_read_is_not_overwritten(role: str) -> None:
    with pytest.raises(CheckError, match=f"its storage is a {role}"):
        check(_in_place(role))


def test_in_place_chains_are_allowed_where_they_belong() -> None:
    check(_in_place("activation"))
    check(_in_place("grad"))
    check(_in_place("derived", phase="derive"))


def test_a_gradient_in_flight_is_not_overwritten() -> None:
    with pytest.raises(CheckError, match="overwritten while #1 sends it"):
        check(_in_place("grad", in_flight=True))


def test_a_view_dies_with_its_owner() -> None:
    d = Draft()
    w = d.leaf("params['w']", (2, 3))
    copy = d.copy(w)
    d.ops += [Gather("shard", (w,), (copy,), 0), Wait(0)]
    view = d.compute(aten.t.default, copy, out=d.value((3, 2), "copy", of=copy))
    d.ops.append(Free((copy,)))
    d.compute(aten.neg.default, view, out=d.value((3, 2)))
    with pytest.raises(CheckError, match="after its storage"):
        check(d.program(Micro((), None, None, None, (None,), ()), mode="forward"))


def test_a_resident_leaf_is_given_and_another_is_not() -> None:
    for resident in (True, False):
        d = Draft()
        w = d.leaf("params['w']", (4,), whole=resident)
        d.compute(aten.neg.default, d.leaves[w].full, out=d.value((4,)))
        program = d.program(Micro((), None, None, None, (None,), ()), mode="forward")
        check_stage(program, "derive")
        if resident:
            check(program)
        else:
            with pytest.raises(CheckError, match="v0 is read but does not exist"):
                check(program)


CASES: list[tuple[dict[str, int], Any, int]] = [
    ({"shard": 1}, None, 1),
    ({"shard": 2}, None, 1),
    ({"shard": 4}, None, 3),
    ({"shard": 2}, zero(1), 2),
    ({"shard": 3}, zero(2), 2),
    ({"replica": 2, "shard": 2}, None, 2),
]


def _built(
    axes: dict[str, int], specs: Any, accum: int, *, rank: int = 0, live: int | None = None
) -> tuple[list[Program], list[tuple[str, Program]]]:
    """The captured program and the program after each pass, under a small budget."""
    captured, mesh = capture(mlp_loss, axes=axes, specs=specs, rank=rank)
    micros = [captured] * accum
    return micros, list(stages(micros, mesh, update=True, live_bytes=live))


@pytest.mark.parametrize("axes, specs, accum", CASES)
def test_every_pass_of_a_captured_loss_is_accepted(
    axes: dict[str, int], specs: Any, accum: int
) -> None:
    captured, programs = _built(axes, specs, accum)
    before: Any = captured
    for stage, program in programs:
        check_stage(program, stage, before=before)
        before = program
    check(before, before=captured)


@given(st.data())
def test_no_op_of_a_program_can_be_left_out(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(PROGRAM.ops) - 1))
    with pytest.raises(CheckError):
        check(_edited(PROGRAM, _without(at)), before=CAPTURED)


@given(st.data())
def test_no_op_can_be_moved_before_what_it_needs(data: st.DataObject) -> None:
    pairs = [
        (early, late)
        for late, op in enumerate(PROGRAM.ops)
        for early, other in enumerate(PROGRAM.ops[:late])
        if set(reads(op)) & set(writes(other))
    ]
    early, late = data.draw(st.sampled_from(pairs))

    def edit(ops: list[Op]) -> None:
        ops.insert(early, ops.pop(late))

    with pytest.raises(CheckError):
        check(_edited(PROGRAM, edit), before=CAPTURED)


@given(st.data())
def test_no_two_computes_of_the_step_can_change_places(data: st.DataObject) -> None:
    """Even where both orders are sound: the order of compute is part of the result."""
    places = [
        at for at, op in enumerate(PROGRAM.ops) if isinstance(op, Compute) and op.phase != "derive"
    ]
    at = data.draw(st.integers(0, len(places) - 2))
    with pytest.raises(CheckError):
        check(_edited(PROGRAM, _swapped(places[at], places[at + 1])), before=CAPTURED)


def test_a_changed_constant_or_operator_is_found() -> None:
    at = next(i for i, op in enumerate(PROGRAM.ops) if getattr(op, "args", ())[1:] == (2,))
    op = PROGRAM.ops[at]
    assert isinstance(op, Compute)
    with pytest.raises(CheckError, match="differs"):
        check(_edited(PROGRAM, _changed(at, args=(op.args[0], 3))), before=CAPTURED)


def test_a_gradient_added_twice_or_never_is_found() -> None:
    captured, programs = _built({"shard": 2}, None, 2)
    program = programs[-1][1]
    at = next(i for i, op in enumerate(program.ops) if isinstance(op, Accumulate))
    for edit in (_without(at), lambda ops: ops.insert(at, ops[at])):
        with pytest.raises(CheckError, match=r"gradient of|never"):
            check(_edited(program, edit), before=captured)


def test_a_reduce_over_the_wrong_axes_is_found() -> None:
    captured, programs = _built({"replica": 2, "shard": 2}, None, 1)
    program = programs[-1][1]
    reduces = [i for i, op in enumerate(program.ops) if isinstance(op, Reduce)]
    assert [program.ops[i].axis for i in reduces[:2]] == ["shard", "replica"]  # pyright: ignore
    with pytest.raises(CheckError, match="not the sum over"):
        check(_edited(program, _changed(reduces[1], axis="shard")), before=captured)


def test_collective_sequences_are_compared() -> None:
    check_same_collectives(draft_step(), _edited(draft_step(), _swapped(2, 3)))
    with pytest.raises(CheckError, match="collective 2 differs"):
        check_same_collectives(draft_step(), _edited(draft_step(), _without(2, 4)))
    with pytest.raises(CheckError, match="more collectives"):
        check_same_collectives(draft_step(), _edited(draft_step(), _without(17)))


@pytest.mark.parametrize("axes", [{"shard": 4}, {"replica": 2, "shard": 2}])
def test_all_ranks_have_one_sequence_of_collectives(axes: dict[str, int]) -> None:
    first, *others = [_built(axes, None, 2, rank=rank)[1][-1][1] for rank in range(4)]
    for other in others:
        check_same_collectives(first, other)
        assert live_bytes(first) == live_bytes(other)


def _dropout_loss(params: Any, batch: Any) -> Any:
    """Nested regions whose random numbers are drawn again."""

    def inner(x: Any, w: Any) -> Any:
        return F.dropout(F.gelu(x @ w), 0.5)

    def block(x: Any, w: Any) -> Any:
        return x + remat(inner)(x, w) @ w.bfloat16().float()

    for w in params:
        batch = remat(block)(batch, w)
    return batch.square().mean()


@pytest.mark.parametrize("accum", [1, 2])
def test_recomputation_and_its_random_numbers_are_followed(accum: int) -> None:
    params, batch = [torch.zeros(8, 8), torch.zeros(8, 8)], torch.zeros(4, 8)
    captured, mesh = capture(_dropout_loss, params, batch)
    again = rematerialise(captured)
    assert len(again.ops) > len(captured.ops)
    check_stage(again, "remat", before=captured)
    before: Any = [captured] * accum
    for stage, program in stages([captured] * accum, mesh, update=True):
        check_stage(program, stage, before=before)
        before = program
    replays = [i for i, op in enumerate(before.ops) if isinstance(op, Rng)]
    for at in replays:
        with pytest.raises(CheckError):
            check(_edited(before, _without(at)), before=[captured] * accum)


def test_renumbering_keeps_the_computation_and_in_place_order_matters() -> None:
    def draft(swap: bool) -> Program:
        d = Draft()
        if swap:
            d.value((1,))
        x = d.value((4,), "input")
        y = d.compute(aten.neg.default, x, out=d.value((4,)))
        steps = [(aten.neg_.default, "in place"), (aten.exp.default, "")]
        outs = []
        for target, kind in reversed(steps) if swap else steps:
            of = y if kind else None
            outs.append(d.compute(target, y, out=d.value((4,), of=of)))
        loss = d.compute(aten.sum.default, outs[0 if swap else 1], out=d.value(()))
        return d.program(Micro((x,), None, loss, None, (), ()), mode="grad")

    check_same_computation(draft(False), draft(False))
    with pytest.raises(CheckError, match="differs"):
        check_same_computation(draft(True), draft(False))


CAPTURED, _PROGRAMS = _built({"shard": 2}, None, 1)
PROGRAM = _PROGRAMS[-1][1]
