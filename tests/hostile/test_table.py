"""The table of hostile inputs in tests/README.md: rows name tests that exist, and their rung."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from tests.hostile.case import Case
from tests.hostile.refusal import Refusal
from tests.hostile.test_cases import CASES
from tests.hostile.test_refusals import REFUSALS

TESTS = Path(__file__).resolve().parent.parent
TEXT = (TESTS / "README.md").read_text(encoding="utf-8").partition("## Hostile inputs")[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|") and "`" in line
]


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def found(name: str) -> Any:
    """What a row names: a case, a refusal, or a test function."""
    path, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"tests.{path}"), attribute)


def test_every_row_names_what_exists() -> None:
    assert len(ROWS) > 60
    for _, tests, _, _ in ROWS:
        assert names(tests)
        for name in names(tests):
            if not name.startswith("test_") and ".test_" not in name:
                name = f"hostile.{name}"
            assert found(name) is not None


def test_the_rung_of_a_row_is_the_one_that_its_cases_ask_for() -> None:
    for kind, tests, _, rung in ROWS:
        things = [found(f"hostile.{name}") for name in names(tests) if ".test_" not in name]
        rungs = {thing.rung.split()[0] for thing in things if isinstance(thing, Case)}
        if any(isinstance(thing, Refusal) for thing in things):
            rungs.add("refused")
        said = set(re.findall("traced|dynamic|refused", rung))
        assert rungs <= said, f"{kind}: {rung} against {rungs}"
        if len(things) == len(names(tests)):
            assert rungs == said, f"{kind}: {rung} against {rungs}"


def test_every_case_and_refusal_has_a_row() -> None:
    listed = {name for _, tests, _, _ in ROWS for name in names(tests)}
    for param in (*CASES, *REFUSALS):
        module, name, _ = param.values
        assert f"{str(module).rpartition('.')[2]}.{name}" in listed, name
