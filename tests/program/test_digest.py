"""The digest is equal exactly where ranks can run their programs together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.programs import capture, draft_step
from zfunc.layout import ShapeDtype, zero
from zfunc.passes import build
from zfunc.program.digest import collective_lines, digest, spec_text
from zfunc.program.ir import Gather, Program, Reduce


def test_it_is_sixteen_bytes_of_the_collective_lines() -> None:
    assert collective_lines(draft_step()) == [
        "gather shard params['w']:float32[3,5]",
        "gather shard params['b']:float32[5]",
        "gather shard params['b']:float32[5]",
        "reduce shard params['w']:float32[3,5] params['b']:float32[5]",
        "status losses 1 weights 0",
        "update params['w'] params['b']",
    ]
    assert len(digest(draft_step())) == 16
    assert digest(draft_step()) == digest(draft_step())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("axes", [{"shard": 4}, {"replica": 2, "shard": 2}])
def test_ranks_with_pieces_of_different_sizes_agree(axes: dict[str, int], stage: int) -> None:
    found = set()
    for rank in range(4):
        captured, mesh = capture(axes=axes, rank=rank, specs=zero(stage))
        found.add(digest(build([captured] * 2, mesh, update=True)))
    assert len(found) == 1


def test_moving_issue_and_wait_does_not_change_it() -> None:
    ops = list(draft_step().ops)
    ops[2], ops[3] = ops[3], ops[2]
    ops[14], ops[13:14] = ops[14], [ops[13]]
    assert digest(dataclasses.replace(draft_step(), ops=tuple(ops))) == digest(draft_step())


def test_what_is_computed_does_not_change_it() -> None:
    ops = [op for op in draft_step().ops if not hasattr(op, "phase")]
    changed = dataclasses.replace(draft_step(), ops=tuple(ops), name="other", limit_bytes=3)
    assert digest(changed) == digest(draft_step())


def _with_op(program: Program, at: int, **fields: Any) -> Program:
    ops = list(program.ops)
    ops[at] = dataclasses.replace(ops[at], **fields)
    return dataclasses.replace(program, ops=tuple(ops))


def _with_leaf(program: Program, **fields: Any) -> Program:
    leaf, *rest = program.leaves
    return dataclasses.replace(program, leaves=(dataclasses.replace(leaf, **fields), *rest))


def _with_dtype(program: Program) -> Program:
    values = [
        dataclasses.replace(v, spec=ShapeDtype(v.spec.shape, torch.bfloat16))
        for v in program.values
    ]
    return dataclasses.replace(program, values=tuple(values))


def test_what_ranks_must_agree_on_changes_it() -> None:
    program = draft_step()
    gather, reduce = program.ops[0], program.ops[13]
    assert isinstance(gather, Gather) and isinstance(reduce, Reduce)
    ops = list(program.ops)
    ops[0], ops[2] = ops[2], ops[0]
    variants = [
        program,
        dataclasses.replace(program, ops=tuple(ops)),
        dataclasses.replace(program, ops=program.ops[:-1]),
        _with_op(program, 0, axis="other"),
        _with_op(program, 13, axis="other"),
        _with_op(program, 13, scatter=False),
        _with_op(program, 13, leaves=(1, 0), ins=reduce.ins[::-1]),
        _with_op(program, 16, losses=()),
        _with_op(program, 16, weights=(8,)),
        _with_op(program, 17, leaves=(1, 0)),
        _with_leaf(program, path="params['v']"),
        _with_leaf(program, spec=ShapeDtype((5, 3), torch.float32)),
        _with_dtype(program),
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)


def test_spec_text() -> None:
    assert spec_text(ShapeDtype((), torch.int64)) == "int64[]"
    assert spec_text(ShapeDtype((2, 3), torch.complex64)) == "complex64[2,3]"
