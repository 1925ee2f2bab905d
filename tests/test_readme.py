"""The README does what it says: its code runs, its links lead somewhere, two commands set up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_code_runs_from_top_to_bottom(capsys: Any) -> None:
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README block {number}", "exec"), names)
    assert names["metrics"]["skipped"] == 0 and torch.isfinite(names["loss"])
    assert "gather" in capsys.readouterr().out


def test_two_commands_do_all_the_set_up() -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines() if line]
    assert len(commands) == 2
    assert all("python3 -m venv" in command for command in commands)
    job, tests = commands
    assert "examples/train_gpt.py" in job
    assert tests.endswith("python -m pytest -q")


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_changes_come_last() -> None:
    assert re.findall(r"^## (.*)$", TEXT, flags=re.MULTILINE)[-1] == "Changes"
