"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import zfunc

# Modules that need hardware or a package beyond the tests' own are imported by what uses them.
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(zfunc.__path__, "zfunc.")
    if not info.name.rpartition(".")[2].startswith("_")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} failed"


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    documented = [
        test.name
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    assert len(documented) > len(MODULES) // 2
