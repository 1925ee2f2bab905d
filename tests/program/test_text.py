"""The printed program: a stable format, compared with stored files.

`UPDATE_SNAPSHOTS=1 python -m pytest tests/program/test_text.py` rewrites the files; read the
difference before committing it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch

from tests.programs import Draft, aten, capture, draft_step
from zfunc.passes import stages
from zfunc.program.digest import digest
from zfunc.program.ir import Accumulate, Call, Collective, Micro, Program, Reduce, Rng, Status
from zfunc.program.text import as_text, bytes_text, op_text, short_path, text_digest

SNAPSHOTS = Path(__file__).parent / "snapshots"


def _compare(name: str, text: str) -> None:
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == path.read_text(encoding="utf-8")


def _captured(stage: str) -> Program:
    captured, mesh = capture()
    return {"capture": captured, **dict(stages([captured], mesh, update=True))}[stage]


def _every_op() -> Program:
    """The ops that `draft_step` has not, in an order that makes no sense."""
    d = Draft({"replica": 2, "shard": 2})
    d.leaf("params['h'][1]['qkv']", (4,))
    d.leaf("params['two words']", (4,))
    x, key = d.value((4,), "input"), d.value((2,), "input", dtype=torch.int64)
    total, more = d.value((4,), "shard"), d.value((4,), "shard")
    piece = d.value((2,))
    d.compute(aten.sum.dim_IntList, x, True, out=piece)
    d.ops[-1] = dataclasses.replace(
        d.ops[-1], kwargs=(("dtype", torch.float64),), regions=("1", "2"), micro=1, packed=True
    )
    d.ops += [
        Rng("record", 0),
        Reduce("replica", (0, 1), (x, piece), (total, more), False, 5, 2_000_000),
        Accumulate((total,), (more,)),
        Collective("gather", "shard", piece, d.value((4,)), (4,), 1),
        Call((0, 1), piece, x, (total, more), 1),
        Status((piece,), (x,), (None, total)),
    ]
    return d.program(Micro((x,), key, piece, x, (None, None), (total, more)), limit=1_540_000)


@pytest.mark.parametrize("stage", ["capture", "derive", "prefetch"])
def test_a_captured_loss_prints_like_its_snapshot(stage: str) -> None:
    _compare(f"mlp_{stage}", as_text(_captured(stage), update="fused"))


def test_drafted_programs_print_like_their_snapshots() -> None:
    _compare("draft_step", as_text(draft_step()))
    _compare("draft_every_op", as_text(_every_op()))


@pytest.mark.parametrize("stage", ["capture", "derive", "prefetch"])
def test_equal_programs_print_alike_without_addresses(stage: str) -> None:
    text = as_text(_captured(stage))
    assert text == as_text(_captured(stage))
    assert "0x" not in text and " at " not in text


@pytest.mark.parametrize("stage", ["capture", "derive", "prefetch"])
def test_there_is_one_line_per_op(stage: str) -> None:
    program = _captured(stage)
    lines = as_text(program).splitlines()
    numbered = [line for line in lines if re.match(r" {0,4}\d+ [a-z]+ +", line)]
    assert [int(line.split()[0]) for line in numbered] == list(range(len(program.ops)))
    assert f"ops {len(program.ops)}  digest {digest(program).hex()[:8]}" in lines[0]
    recipes = sum(line.startswith("      derive ") for line in lines)
    assert recipes == len({id(op) for op in program.derived.values()})
    for number, line in enumerate(numbered):
        assert line[6:] == op_text(program.ops[number], program)


def test_long_programs_are_cut() -> None:
    lines = as_text(draft_step(), max_lines=3).splitlines()
    assert lines[1:] == [
        "      in         micro 0  v2:float32[2,3]",
        "    0 gather     v3=w:float32[3,5]  60B over shard #0",
        "    1 wait       #0",
        "    2 gather     v4=b:float32[5]  20B over shard #1",
        "  ... 15 more ops",
        "      out        micro 0  loss v8",
    ]
    assert as_text(draft_step(), max_lines=99) == as_text(draft_step())


def test_arguments_print_as_what_they_are() -> None:
    d = Draft()
    x = d.value((2,), "input")
    objects = (1.5, None, "mean", torch.device("cpu"), torch.preserve_format, torch.ones(2), Draft)
    d.compute(aten.add.Tensor, x, *objects, [x, True], out=d.value((2,)))
    text = op_text(d.ops[0], d.program(Micro((x,), None, None, None, (), ())))
    assert text == (
        "compute    v1:float32[2] = aten.add.Tensor(v0, 1.5, None, 'mean', cpu, preserve_format, "
        "<tensor float32[2]>, <Draft>, [v0, True])  forward"
    )


def test_the_text_digest_sees_what_the_digest_does_not() -> None:
    program = draft_step()
    other = dataclasses.replace(program, ops=(*program.ops[:3], *program.ops[4:]))
    assert digest(program) == digest(other)
    assert text_digest(program) == text_digest(draft_step()) != text_digest(other)


def test_short_paths() -> None:
    d = Draft()
    paths = ["params['h'][1]['qkv']", "params", "params[0]['a b']", "params.w", "params['x9']['1']"]
    leaves = [d.leaves[d.leaf(path, (1,))] for path in paths]
    assert [*map(short_path, leaves)] == ["h[1].qkv", "params", "[0]['a b']", "w", "x9['1']"]
    argument = dataclasses.replace(leaves[0], path="batch['ema']['w']", is_param=False)
    assert short_path(argument) == "batch['ema']['w']"


def test_bytes_have_three_digits() -> None:
    sizes = {
        0: "0B",
        999: "999B",
        1000: "1.00kB",
        9_994: "9.99kB",
        9_996: "10.0kB",
        99_950: "100kB",
        999_499: "999kB",
        999_500: "1.00MB",
        12_340_000: "12.3MB",
        5 * 10**15: "5000TB",
    }
    assert {size: bytes_text(size) for size in sizes} == sizes
