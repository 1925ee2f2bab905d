"""Pictures and text of programs: what they show is what the program and the cost model say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc
from zfunc import optim, report
from zfunc.program import cost_analysis

PNG = b"\x89PNG\r\n\x1a\n"
DARK, RED = (33 / 255, 113 / 255, 181 / 255, 1.0), (192 / 255, 57 / 255, 43 / 255, 1.0)


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    x = batch
    for w in params["layers"]:
        x = torch.tanh(x @ w)
    return (x @ params["head"]).square().mean()


def lowered(
    axes: dict[str, int], *, live_bytes: int | None = None, remat: Any = None
) -> zfunc.Lowered:
    """Four layers of 1 MB each over an abstract mesh."""
    w = zfunc.ShapeDtype((512, 512), torch.float32)
    like = {"layers": [w] * 4, "head": zfunc.ShapeDtype((512, 3), torch.float32)}
    budget = zfunc.Prefetch(live_bytes=live_bytes)
    step = zfunc.shard(loss_fn, zfunc.abstract_mesh(axes), prefetch=budget, remat=remat)
    return step.lower(step.abstract(like, optim.adamw(1e-3)), torch.zeros(8, 512))


def rows_of(axes: Any) -> dict[str, list[tuple[float, float, Any]]]:
    """Begin, end and colour of the bars of each labelled row."""
    names = {
        round(y): text.get_text()
        for y, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    }
    rows: dict[str, list[tuple[float, float, Any]]] = {name: [] for name in names.values()}
    for bars in axes.containers:
        for bar in bars:
            name = names[round(bar.get_y() + bar.get_height() / 2)]
            rows[name].append((bar.get_x(), bar.get_x() + bar.get_width(), bar.get_facecolor()))
    return rows


@pytest.mark.parametrize("draw", [report.timeline, report.memory, report.program])
@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 64}, {"replica": 2, "shard": 4}], ids=str)
def test_writes_a_png(draw: Any, axes: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    figure = draw(lowered(axes), path)
    assert path.read_bytes().startswith(PNG)
    assert figure.axes[-1].get_xlabel() == "modelled time (ms)"
    assert str(zfunc.abstract_mesh(axes)) in figure.axes[0].get_title(loc="left")


def test_takes_a_bare_program() -> None:
    low = lowered({"shard": 4})
    assert rows_of(report.timeline(low.program).axes[0]) == rows_of(report.timeline(low).axes[0])


def test_every_leaf_has_a_row_with_its_gathers_and_its_reduce() -> None:
    low = lowered({"shard": 8}, live_bytes=3_500_000)
    rows = rows_of(report.timeline(low).axes[0])
    paths = ["head", *(f"layers[{i}]" for i in range(4))]
    assert sorted(rows) == sorted(["compute", "network", *paths])
    text = low.as_text()
    for path in paths:
        gathers = text.count(f"={path}:")
        assert gathers >= 1
        assert sum(colour == DARK for _, _, colour in rows[path]) == gathers
        assert sum(colour == RED for _, _, colour in rows[path]) == 1
    assert any(text.count(f"={path}:") == 2 for path in paths), "nothing is gathered again"


def test_the_clock_is_that_of_the_cost_model() -> None:
    low = lowered({"shard": 8}, live_bytes=3_500_000)
    cost = cost_analysis(low.program, low.mesh.hw, dict(low.mesh.axes))
    axes = report.timeline(low).axes[0]
    rows = rows_of(axes)
    assert axes.get_xlim()[1] == pytest.approx(cost.step_s * 1e3)
    computing = sum(stop - start for start, stop, _ in rows["compute"])
    assert computing == pytest.approx(cost.compute_s * 1e3)
    sending = sum(stop - start for start, stop, _ in rows["network"])
    assert sending == pytest.approx(cost.communication_s * 1e3)


def test_a_copy_is_held_only_after_it_has_travelled() -> None:
    rows = rows_of(report.timeline(lowered({"shard": 8})).axes[0])
    for path in ("head", "layers[0]", "layers[3]"):
        pale = [bar for bar in rows[path] if bar[2] not in (DARK, RED)]
        dark = [bar for bar in rows[path] if bar[2] == DARK]
        assert [stop for _, stop, _ in pale] == pytest.approx([start for start, _, _ in dark])


def test_memory_shows_the_peak_under_the_budget() -> None:
    low = lowered({"shard": 8}, live_bytes=3_500_000)
    peak = low.memory_analysis().peak_live_bytes
    axes = report.memory(low).axes[0]
    assert axes.get_ylabel() == "live bytes (MB)"
    texts = [text.get_text() for text in axes.texts]
    assert "budget 3.50MB" in texts and any(text.startswith("peak ") for text in texts)
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in dashed] == [3.5]
    marked = next(line for line in axes.lines if line.get_marker() == "o")
    assert marked.get_ydata()[0] == pytest.approx(peak / 1e6)


def test_a_budget_far_above_is_named_but_not_drawn() -> None:
    axes = report.memory(lowered({"shard": 8})).axes[0]
    assert not [line for line in axes.lines if line.get_linestyle() == "--"]
    assert any("far above" in text.get_text() for text in axes.texts)


def test_long_programs_are_timed_in_seconds() -> None:
    w = zfunc.ShapeDtype((2048, 2048), torch.float32)
    slow = zfunc.Hardware(flops_per_s=1e9)
    step = zfunc.shard(loss_fn, zfunc.abstract_mesh({"shard": 2}, hw=slow))
    state = step.abstract({"layers": [w], "head": w}, optim.sgd(0.1))
    low = step.lower(state, zfunc.ShapeDtype((1024, 2048), torch.float32))
    axes = report.memory(low).axes[0]
    assert axes.get_xlabel() == "modelled time (s)"
    assert axes.get_xlim()[1] == pytest.approx(low.cost_analysis().step_s)


def test_recompute_has_its_own_colour() -> None:
    low = lowered({"shard": 8}, remat=zfunc.policies.nothing)
    legend = report.timeline(low).axes[0].get_legend()
    assert "recompute" in [text.get_text() for text in legend.get_texts()]


def test_summary_has_bytes_time_and_gathers() -> None:
    low = lowered({"shard": 8}, live_bytes=3_500_000)
    text = report.summary(low)
    assert text.startswith("step of loss_fn on mesh[shard:8]\ngathers: ")
    assert str(low.memory_analysis()) in text
    assert str(low.cost_analysis()) in text
    assert "gathers: none" in report.summary(lowered({"shard": 1}))


def test_forward_programs_can_be_drawn() -> None:
    mesh = zfunc.local_mesh(2)

    def draw(mesh: zfunc.Mesh) -> list[str]:
        params = zfunc.scatter({"w": torch.ones(4, 4)}, mesh, zfunc.Flat())
        forward = zfunc.infer(lambda p, x: x @ p["w"], mesh)
        return list(rows_of(report.timeline(forward.lower(params, torch.ones(1, 4))).axes[0]))

    assert mesh.run(draw) == [["compute", "network", "w"]] * 2


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    low = lowered({"shard": 2})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'zfunc\[examples\]'"):
        report.timeline(low)
