"""Leaves from safetensors files: the same values, one leaf in memory at a time, strict names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zfunc
from tests.harness import assert_equal, gathered, ranks
from tests.ranks import run_ranks
from zfunc import optim
from zfunc.checkpoint import Stored, load_safetensors

ROOT = Path(__file__).resolve().parent.parent


class Net(nn.Module):
    """A tie, a buffer that is saved, one that is not, and a leaf that no world cuts evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(5), persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(self.table[index])))


def saved(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """Random weights, in two files of a folder; the tie under the name of the head."""
    generator = torch.Generator().manual_seed(0)
    state = {n: x for n, x in Net().state_dict().items() if n != "embed.weight"}
    state = {
        n: torch.randn(x.shape, generator=generator) if x.is_floating_point() else x + 7
        for n, x in state.items()
    }
    state = {n: x for n, x in (state | changes).items() if x is not None}
    names = sorted(state)
    for part, chosen in enumerate((names[::2], names[1::2])):
        save_file({n: state[n] for n in chosen}, folder / f"model-{part}.safetensors")
    return state


def loaded(mesh: Any, folder: str) -> list[Tensor]:
    apply_fn, params = zfunc.module(lambda: Net().eval())
    step = zfunc.shard(lambda p, x: apply_fn(p, x).sum(), mesh, trainable=apply_fn.trainable)
    stored = load_safetensors(folder, params, names=apply_fn.names)
    return gathered(step.init(stored, optim.sgd(0.1)).params)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_module_takes_what_was_saved(tmp_path: Path, world: int) -> None:
    state = saved(tmp_path)
    wanted = [torch.as_tensor(state[n]) for n in sorted(state) if n.startswith("norm.")]
    buffers = [state[f"norm.{n}"] for n in ("num_batches_tracked", "running_mean", "running_var")]
    params = [state[n] for n in ("head.weight", "head.bias", "norm.bias", "norm.weight")]
    assert len(wanted) == 5
    for leaves in ranks(world, loaded, str(tmp_path)):
        assert_equal(leaves, [*buffers, torch.arange(5), *params])


def test_on_processes(tmp_path: Path) -> None:
    saved(tmp_path)
    expected = ranks(2, loaded, str(tmp_path))
    for got, wanted in zip(run_ranks(2, loaded, str(tmp_path)), expected, strict=True):
        assert_equal(got, wanted)


def test_trees_of_any_form_and_dtype(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    save_file(
        {"a": torch.arange(4.0).bfloat16(), "deep": torch.ones(2, 3), "z": torch.zeros(1)}, file
    )
    like = {"a": torch.empty(4, device="meta"), "b": [zfunc.ShapeDtype((2, 3), torch.float64), 5]}
    names = {"b/0": "deep"}
    with pytest.raises(zfunc.TreeMismatchError, match="names that no leaf has: z"):
        load_safetensors(file, like, names=names)
    stored = load_safetensors(file, like, names=names, strict=False)
    assert isinstance(stored["a"], Stored) and stored["b"][1] == 5
    step = zfunc.shard(lambda p, x: p["a"].sum() + p["b"][0].sum(), zfunc.mesh())
    state = step.init(stored, optim.sgd(0.1))
    after = zfunc.gather(state.params)
    assert torch.equal(after["a"], torch.arange(4.0)) and after["b"][0].dtype == torch.float64
    abstract = step.abstract(stored, optim.sgd(0.1))
    assert zfunc.tree.map(lambda x: tuple(x.shape), abstract.params["a"]).local == (4,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head.bias": None}, "missing: params/head.bias"),
        ({"head.weight": None}, "missing: params/embed.weight"),
        ({"norm.running_var": None}, "missing: buffers/norm.running_var"),
        ({"other": torch.zeros(1)}, "names that no leaf has: other"),
        (
            {"head.bias": torch.zeros(4)},
            r"params/head.bias has another shape(.|\n)*\[5\](.|\n)*\[4\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: Any, message: str) -> None:
    saved(tmp_path, **changes)
    apply_fn, params = zfunc.module(Net)
    with pytest.raises(zfunc.TreeMismatchError, match=message):
        load_safetensors(tmp_path, params, names=apply_fn.names)


def test_files_that_are_none(tmp_path: Path) -> None:
    apply_fn, params = zfunc.module(Net)
    for missing in (tmp_path, tmp_path / "none.safetensors"):
        with pytest.raises(FileNotFoundError, match="no such file"):
            load_safetensors(missing, params)
    saved(tmp_path)
    whole = (tmp_path / "model-0.safetensors").read_bytes()
    (tmp_path / "model-0.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_safetensors(tmp_path, params, names=apply_fn.names)
    (tmp_path / "model-0.safetensors").write_bytes(whole)
    (tmp_path / "model-2.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match="in two files"):
        load_safetensors(tmp_path, params, names=apply_fn.names)


def changed_on_one_rank(mesh: Any, folder: str) -> str:
    files = Path(folder) / ("own" if mesh.rank else "common")
    apply_fn, params = zfunc.module(lambda: nn.Linear(3, 2))
    step = zfunc.shard(lambda p, x: apply_fn(p, x).sum(), mesh)
    with pytest.raises(zfunc.LayoutError) as raised:
        step.init(load_safetensors(files, params), optim.sgd(0.1))
    return str(raised.value)


def test_ranks_that_read_other_values_are_told(tmp_path: Path) -> None:
    for name, fill in (("common", 0.0), ("own", 1.0)):
        (tmp_path / name).mkdir()
        state = {"weight": torch.zeros(2, 3), "bias": torch.full((2,), fill)}
        save_file(state, tmp_path / name / "m.safetensors")
    for message in ranks(2, changed_on_one_rank, str(tmp_path)):
        assert message.startswith("params['params']['bias'] differs between ranks")


LAYERS, WIDTH = 24, 1024  # 24 leaves of 4 MiB
MEASURE = f"""
import json, sys, torch, zfunc
from torch import nn
from zfunc import optim

def peak():
    text = open("/proc/self/status").read()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024

def net():
    return nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})])

apply_fn, params = zfunc.module(net)
mesh = zfunc.mesh()
step = zfunc.shard(lambda p, x: apply_fn(p, x).sum(), mesh, trainable=False)
warm, shapes = zfunc.module(lambda: nn.Linear(2, 2))
zfunc.shard(lambda p, x: warm(p, x).sum(), mesh).init(
    zfunc.tree.map(lambda x: torch.zeros(x.shape), shapes), optim.sgd(0.1))
before = peak()
state = step.init(zfunc.checkpoint.load_safetensors(sys.argv[1], params), optim.sgd(0.1))
whole = sum(x.local.nbytes for x in state.params["params"].values())
grown = zfunc.scatter(torch.tensor(float(peak() - before)), mesh, zfunc.P(), reduce="mean").local
if mesh.rank == 0:
    print(json.dumps({{"grown": float(grown), "own": whole}}))
"""


def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    leaf = 4 * WIDTH**2
    save_file(
        {f"{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(LAYERS)},
        tmp_path / "m.safetensors",
    )
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ran = subprocess.run(
        [sys.executable, *launch, str(script), str(tmp_path / "m.safetensors")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["own"] == LAYERS * leaf // 4
    assert told["grown"] <= told["own"] + 2 * leaf  # a leaf, and what the allocator rounds up
