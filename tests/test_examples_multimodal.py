"""The example of frozen parts: ranks with and without images, and images that are named right."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc

FOLDER = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))  # it takes the model of its neighbour
    name = "multimodal_frozen"
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_projector_alone_learns(example: Any) -> None:
    args = example.parse(["--pretrain", "150", "--steps", "60", "--layers", "1"])
    first, second = zfunc.local_mesh(2).run(lambda mesh: example.train(args, mesh))
    assert first["losses"] == second["losses"]
    assert first["accuracy"] == second["accuracy"] > 0.5  # chance is a tenth
    for name in ("encoder", "language_model"):
        before, after = (zfunc.tree.leaves(first[when][name]) for when in ("before", "params"))
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    half = args.features * args.width * 4 // 2
    assert first["state_bytes"] <= 2 * half + 64


def test_prints_and_draws(
    example: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--pretrain", "2", "--steps", "3", "--layers", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["multimodal_frozen.py", *options])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    example.main()
    printed = capsys.readouterr()
    assert "named right" in printed.out and "projector" in printed.err
    assert (tmp_path / "multimodal_frozen.png").read_bytes().startswith(b"\x89PNG")
