"""The examples: the same numbers on any mesh, honest figures, and a run from the command line."""

from __future__ import annotations

import collections
import importlib.util
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "examples" / "train_gpt.py"
SMALL = {
    "--layers": 1, "--width": 32, "--heads": 2, "--seq": 32,
    "--batch": 8, "--held-out": 6, "--evaluate-every": 4,
}  # fmt: skip
OPTIONS = [str(part) for pair in SMALL.items() for part in pair]


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with a pattern, large enough for all windows."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: {i * i % 97} is {i % 7}\n" for i in range(2000)))
    return path


def curves(example: Any, data: Path, axes: dict[str, int], *options: str) -> dict[str, Any]:
    """The curves of a short run, which must be alike on every rank."""
    args = example.parse([*OPTIONS, "--data", str(data), *options])
    first, *others = zfunc.local_mesh(axes).run(lambda mesh: example.train(args, mesh)[0])
    assert all(other == first for other in others)
    return first


def test_the_curve_is_the_same_on_any_mesh_in_float64(example: Any, data: Path) -> None:
    options = ("--dtype", "float64", "--steps", "6")
    want = curves(example, data, {"shard": 1}, *options)
    assert len(want["losses"]) == 6 and sorted(want["held_out"]) == [0, 4, 6]
    cases: list[tuple[dict[str, int], tuple[str, ...]]] = [
        ({"shard": 4}, ()),
        ({"shard": 2}, ("--accum", "2", "--remat", "--live-bytes", "1e9")),
    ]
    for axes, more in cases:
        got = curves(example, data, axes, *options, *more)
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-10, rel=0), (axes, more)
        assert got["held_out"] == pytest.approx(want["held_out"], abs=1e-10, rel=0), (axes, more)


def test_the_curve_is_the_same_on_any_mesh_in_float32(example: Any, data: Path) -> None:
    want = curves(example, data, {"shard": 1}, "--steps", "20")
    for axes in ({"shard": 2}, {"replica": 2, "shard": 2}):
        got = curves(example, data, axes, "--steps", "20")
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-4, rel=0)
    assert want["losses"][0] == pytest.approx(math.log(256), abs=0.2)
    assert want["held_out"][20] < want["held_out"][0] - 1.0


def test_bigram_entropy_against_a_count_by_hand(example: Any) -> None:
    train, held_out = b"abacabadabacabae", b"abcabd"
    pairs = collections.Counter(itertools.pairwise(train))
    firsts = collections.Counter(train[:-1])
    entropy = -sum(n * math.log(n / firsts[a]) for (a, _), n in pairs.items()) / len(train[1:])
    paid = [
        -math.log((pairs[a, b] + 1) / (firsts[a] + 256)) for a, b in itertools.pairwise(held_out)
    ]
    got = example.bigram_entropy(
        torch.tensor(list(train), dtype=torch.uint8), torch.tensor([list(held_out)])
    )
    assert got == pytest.approx((entropy, sum(paid) / len(paid)))


def test_bytes_are_held_out_by_file(example: Any, tmp_path: Path) -> None:
    for i in range(21):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i:02}>")
    train, held_out = (bytes(part.tolist()) for part in example.read_corpus(tmp_path))
    assert held_out == b"<00><10><20>"
    assert train == b"".join(b"<%02d>" % i for i in range(21) if i % 10)


def test_of_a_single_file_the_last_tenth_is_held_out(example: Any, tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(bytes(range(100)))
    train, held_out = (bytes(part.tolist()) for part in example.read_corpus(path))
    assert (train, held_out) == (bytes(range(90)), bytes(range(90, 100)))


def test_the_library_s_source_is_large_and_split(example: Any) -> None:
    train, held_out = example.read_corpus(None)
    assert 1_000_000 < len(train) <= 4_000_000
    assert 100_000 < len(held_out) <= 400_000


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--batch", "3"), "multiple of 2 ranks"), (("--seq", "60000"), "too short")],
)
def test_what_does_not_fit_is_said(
    example: Any, data: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        curves(example, data, {"shard": 2}, *options)


def check_run(out: Path, printed: str, bar: str, ranks: int) -> None:
    """Pictures, a table whose measurements agree with its predictions, losses, a progress bar."""
    for name in ("loss.png", "program.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    rows = {line[:20].strip(): line[20:].split() for line in printed.splitlines()}
    for name in ("parameters", "gradients", "optimizer state"):
        predicted, measured, unsharded = map(float, rows[name])
        assert measured == pytest.approx(predicted, abs=0.002)
        assert unsharded == pytest.approx(ranks * predicted, abs=0.002)
    predicted, measured, unsharded = map(float, rows["all tensors, peak"])
    assert 0.9 * predicted <= measured <= predicted + 0.001
    assert unsharded >= predicted or ranks == 1
    assert re.search(r"held-out loss \d\.\d+ nats per byte, -?\d\.\d+ below byte bigrams", printed)
    assert "tokens/s" in bar and "exposed communication" in bar


def test_runs_as_one_process(
    example: Any,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = [*OPTIONS, "--steps", "3", "--data", str(data), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [str(FILE), *options])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    example.main()
    printed = capsys.readouterr()
    check_run(tmp_path / "out", printed.out, printed.err, 1)


def test_runs_under_torchrun(data: Path, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [*OPTIONS, "--steps", "3", "--data", str(data), "--out", str(tmp_path / "out")]
    ran = subprocess.run(
        [sys.executable, *launch, str(FILE), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    check_run(tmp_path / "out", ran.stdout, ran.stderr, 2)
    assert "Warning" not in ran.stderr
