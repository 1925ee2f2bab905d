"""The example of compression: the same accuracy on any mesh, in a part of the bytes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import zfunc

FILE = Path(__file__).resolve().parent.parent / "examples" / "compress_digits.py"


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("compress_digits", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def some(example: Any, *names: str) -> dict[str, Any]:
    return {name: example.WAYS[name] for name in names}


def test_accuracy_in_few_bytes(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        example, "WAYS", some(example, "whole", "8 bits", "4 bits", "a tenth, by magnitude")
    )
    args = example.parse(["--steps", "60", "--width", "64"])
    first, second = zfunc.local_mesh(2).run(lambda mesh: example.train(args, mesh))
    assert first == second
    accuracy, whole = first["whole"]
    assert accuracy > 0.9
    for name, most in {"8 bits": 0.3, "4 bits": 0.2}.items():
        assert first[name][1] <= most * whole
        assert first[name][0] > accuracy - 0.05
    assert first["a tenth, by magnitude"][1] <= 0.2 * whole


def test_prints_and_draws(
    example: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--steps", "2", "--width", "16", "--out", str(tmp_path)]
    chosen = some(example, "a tenth, by movement", "a quarter of the units", "a tenth, 4 bits")
    monkeypatch.setattr(example, "WAYS", chosen)
    monkeypatch.setattr(sys, "argv", ["compress_digits.py", *options])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    example.main()
    printed = capsys.readouterr()
    assert all(name in printed.out for name in example.WAYS) and "4 bits" in printed.err
    assert (tmp_path / "compress_digits.png").read_bytes().startswith(b"\x89PNG")
