"""The layers of the package: a module imports only what stands before it in LAYERS.

A new module fails here until it has its place in the list. Imports inside functions count, those
for type checkers do not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zfunc"

# Lowest first; within a line, left to right. A package is one entry.
LAYERS = """
errors  ops  tree  policy  replay
scaling  hardware  settings  meshes  layout  sharded  random  schedules  data
checkpoint  quantised  adapters  compress
scope  comm  agree  program  rematerialise  tiling  optim
capture  precision  collective  passes
execute
state  params  masters  dynamic  programs  resolve  update  metrics
training  explain  lowered  adopt  init
spmd  step  inference  modules
report
__init__
"""

ORDER = {name: i for i, name in enumerate(LAYERS.split())}
PURE = ("passes", "program")
IMPURE = {
    "torch.distributed", "asyncio", "datetime", "fileinput", "glob", "io", "mmap", "os", "pathlib",
    "shutil", "socket", "subprocess", "tempfile", "threading", "time", "timeit",
}  # fmt: skip
MAX_LINES = 450

# rglob does not follow the link zfunc/ops.
FILES = sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "ops").rglob("*.py")})
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def entry(path: Path) -> str:
    """The name in LAYERS that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_for_type_checkers(child):
            yield from walk(child)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import; `from a import b` is both `a` and `a.b`."""
    inside = ("zfunc", *path.relative_to(PACKAGE).parts[:-1]) if PACKAGE in path.parents else ()
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) + 1 - node.level] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else ())))
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def entries_used(path: Path) -> Iterator[tuple[int, str]]:
    """Line and entry of each module of the package that a file imports."""
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] == "zfunc" and len(parts) > 1 and exists(parts[1]):
            yield line, parts[1]


def exists(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()


def test_every_module_has_its_layer() -> None:
    unknown = sorted({entry(p) for p in FILES} - ORDER.keys())
    assert not unknown, f"give {', '.join(unknown)} a place in LAYERS, {label(Path(__file__))}"


@pytest.mark.parametrize("path", FILES, ids=label)
def test_imports_point_down(path: Path) -> None:
    own = entry(path)
    wrong = sorted(
        f"{label(path)}:{line}: {own} imports {used}, which is not below it in LAYERS"
        for line, used in set(entries_used(path))
        if used != own and ORDER.get(used, 0) >= ORDER.get(own, len(ORDER))
    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in FILES if entry(p) == "ops"], ids=label)
def test_ops_stands_alone(path: Path) -> None:
    for line, name in imported(path):
        top = name.split(".")[0]
        allowed = top in sys.stdlib_module_names or top in ("torch", "numpy")
        assert allowed or name.startswith("zfunc.ops"), f"{label(path)}:{line}: imports {name}"


@pytest.mark.parametrize("path", [p for p in FILES if entry(p) in PURE], ids=label)
def test_passes_are_pure(path: Path) -> None:
    for line, name in imported(path):
        parts = name.split(".")
        prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
        assert not prefixes & IMPURE, f"{label(path)}:{line}: a pure module imports {name}"
    opens = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "open"
    ]
    assert not opens, f"{label(path)}:{opens}: a pure module opens files"


@pytest.mark.parametrize("path", EXAMPLES, ids=label)
def test_examples_use_public_names(path: Path) -> None:
    import zfunc

    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] == "zfunc":
            private = [p for p in parts if p.startswith("_")]
            assert not private, f"{label(path)}:{line}: imports {name}"
            public = len(parts) == 1 or parts[1] in zfunc.__all__
            assert public, f"{label(path)}:{line}: zfunc has no public name {parts[1]}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "zfunc":
            public = node.attr in zfunc.__all__
            assert public, f"{label(path)}:{node.lineno}: zfunc.{node.attr} is not public"


def test_files_are_short() -> None:
    folders = (PACKAGE, ROOT / "ops", ROOT / "native", ROOT / "examples", ROOT / "tests")
    sources = {".py", ".pyi", ".cpp", ".hpp", ".inc"}
    files = [p for f in folders for p in f.rglob("*") if p.suffix in sources]
    lengths = {label(p): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    long = {name: n for name, n in lengths.items() if n > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines (two ideas in one file?): {long}"
