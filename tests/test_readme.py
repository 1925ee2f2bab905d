"""The README does what it says: its code runs, its links lead somewhere, two commands set up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import zfunc

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


def test_line_counts_are_about_right() -> None:
    counts = re.findall(r"\]\(([\w/.]+\.py)\)\s\((?:about )?(\d+)(?: lines)?\)", TEXT)
    assert len(counts) == 5
    for target, said in counts:
        lines = len((ROOT / target).read_text(encoding="utf-8").splitlines())
        assert abs(lines - int(said)) <= 0.1 * lines, f"{target} has {lines} lines, not {said}"


def test_public_names_exist() -> None:
    names = set(re.findall(r"`(?:zfunc\.)?((?:optim|random|schedules)\.\w+)", TEXT))
    names |= set(re.findall(r"`zfunc\.(\w+)", TEXT)) - {"module"}  # said not to be there yet
    assert "optim.clip_by_global_norm" in names and "gather" in names
    for name in names:
        found: Any = zfunc
        for part in name.split("."):
            found = getattr(found, part)


def test_changes_come_last() -> None:
    assert re.findall(r"^## (.*)$", TEXT, flags=re.MULTILINE)[-1] == "Changes"
