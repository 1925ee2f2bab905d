"""The example of batches by tokens: every rank does the same work, and less of it is padding."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

import zfunc

FOLDER = Path(__file__).resolve().parent.parent / "examples"
SMALL = {
    "samples": 80, "longest": 128, "tokens": 512, "buckets": 3, "turns": 2, "steps": 2,
    "layers": 1, "width": 16, "heads": 2,
}  # fmt: skip
OPTIONS = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))  # it takes the model of its neighbour
    spec = importlib.util.spec_from_file_location("by_tokens", FOLDER / "by_tokens.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ranks_take_equal_steps_with_less_padding(example: Any) -> None:
    args = example.parse(OPTIONS)
    runs = zfunc.local_mesh(2).run(lambda mesh: example.compare(args, mesh))
    for lengths, (packed, padded) in runs:
        assert len(lengths) == 80 and max(lengths) <= 129
        assert packed.plan.padding() < padded.plan.padding() / 2
        for way in (packed, padded):
            assert sorted(way.plan.indices()) == list(range(80))
            assert way.step.explain().misses == len(way.plan.shapes())
            assert len(way.losses) == min(4, len(way.plan)) and len(way.rates) == 2
            assert way.losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert [way.losses for way in runs[0][1]] == [way.losses for way in runs[1][1]]


def test_prints_and_draws(
    example: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["by_tokens.py", *OPTIONS, "--out", str(tmp_path)])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    example.main()
    printed = capsys.readouterr()
    assert "times the tokens per second" in printed.out and "turn" in printed.err
    assert (tmp_path / "by_tokens.png").read_bytes().startswith(b"\x89PNG")
