"""Report: a program as a picture and as a page of text, before or after it has run.

Everything is read from the program and the cost model; nothing is measured. Time is modelled: the
two queues, compute and network, of `zfunc.program.cost`. So a picture of 512 ranks needs one CPU.
Drawing needs matplotlib, which comes with the extra `examples`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfunc.hardware import Hardware
from zfunc.lowered import Lowered
from zfunc.program.cost import op_seconds
from zfunc.program.ir import (
    Collective,
    Compute,
    Free,
    Gather,
    Program,
    Reduce,
    Status,
    Update,
    Wait,
)
from zfunc.program.memory import memory_analysis
from zfunc.program.text import bytes_text, short_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["memory", "program", "summary", "timeline"]

_PHASES = {
    "forward": "#cfe2f3",
    "backward": "#fbe0c4",
    "recompute": "#ddd2ea",
    "update": "#d0d0d0",
}
_TRAVELS, _HELD, _REDUCES = "#9ecae1", "#2171b5", "#c0392b"
_MAX_LABELS = 40


def timeline(lowered: Lowered | Program, path: str | Path | None = None) -> Figure:
    """Draws what is gathered when: one row per leaf over modelled time.

    Pale: the gather travels; dark: the copy is held; red: the gradient is reduced. The two rows at
    the top are the queues of the cost model, compute (coloured by phase, white where it waits) and
    network.

    Args:
        lowered: what `lower` returned, or its program.
        path: where to write the picture (the ending says in which format); None writes none.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> import torch, zfunc
        >>> step = zfunc.shard(lambda p, b: (b @ p["w"]).sum(), zfunc.abstract_mesh({"shard": 8}))
        >>> state = step.abstract({"w": torch.ones(4, 4)}, zfunc.optim.sgd(0.1))
        >>> figure = timeline(step.lower(state, torch.ones(2, 4)))
    """
    plan = _Plan.of(lowered)
    figure = _figure(_rows_height(plan))
    axes = figure.subplots()
    _draw_timeline(axes, plan)
    axes.set_title(_title(plan), fontsize=9, loc="left")
    _label_time(axes, plan)
    return _saved(figure, path)


def memory(lowered: Lowered | Program, path: str | Path | None = None) -> Figure:
    """Draws live bytes over modelled time, under the budget, with the peak marked.

    Args:
        lowered: what `lower` returned, or its program.
        path: where to write the picture; None writes none.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plan = _Plan.of(lowered)
    figure = _figure(2.6)
    axes = figure.subplots()
    _draw_memory(axes, plan)
    axes.set_title(_title(plan), fontsize=9, loc="left")
    _label_time(axes, plan)
    return _saved(figure, path)


def program(lowered: Lowered | Program, path: str | Path | None = None) -> Figure:
    """Draws `timeline` above `memory` over the same time.

    Args:
        lowered: what `lower` returned, or its program.
        path: where to write the picture; None writes none.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plan = _Plan.of(lowered)
    height = _rows_height(plan)
    figure = _figure(height + 1.9)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[height, 1.9])
    _draw_timeline(above, plan)
    _draw_memory(below, plan)
    above.set_title(_title(plan), fontsize=9, loc="left")
    _label_time(below, plan)
    return _saved(figure, path)


def summary(lowered: Lowered) -> str:
    """Says on one page what a program does: its bytes, its time, and how often leaves are gathered.

    Args:
        lowered: what `lower` returned.

    Returns:
        Some lines of text.

    Example:
        >>> import torch, zfunc
        >>> step = zfunc.shard(lambda p, b: (b @ p["w"]).sum(), zfunc.abstract_mesh({"shard": 8}))
        >>> state = step.abstract({"w": torch.ones(4, 4)}, zfunc.optim.sgd(0.1))
        >>> print(summary(step.lower(state, torch.ones(2, 4))).splitlines()[0])
        step of <lambda> on mesh[shard:8]
    """
    plan = _Plan.of(lowered)
    counts = collections.Counter(
        leaf for op in plan.program.ops if isinstance(op, Gather) for leaf in op.leaves
    )
    times = collections.Counter(counts.values())
    often = ", ".join(f"{times[count]} leaves {count} times" for count in sorted(times))
    return "\n".join(
        [
            f"{plan.program.mode} of {plan.program.name} on {plan.mesh}",
            f"gathers: {often or 'none'}",
            "",
            str(lowered.memory_analysis()),
            "",
            str(lowered.cost_analysis()),
        ]
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """A program on the clock of the cost model.

    Attributes:
        program: the program.
        mesh: its mesh, as text.
        begin: when compute reaches each op; one entry more for the end.
        sent: op -> when it is on the network, for the ops that communicate.
        unit: of these times.
        live_bytes: live bytes during each op.
    """

    program: Program
    mesh: str
    begin: list[float]
    sent: dict[int, tuple[float, float]]
    unit: str
    live_bytes: tuple[int, ...]

    @classmethod
    def of(cls, lowered: Lowered | Program) -> _Plan:
        if isinstance(lowered, Program):
            found = [leaf.layouts.params.mesh for leaf in lowered.leaves]
            program, mesh = lowered, found[0] if found else None
        else:
            program, mesh = lowered.program, lowered.mesh
        hw, axes = (mesh.hw, dict(mesh.axes)) if mesh else (Hardware(), {})
        begin, sent = _clock(program, hw, axes)
        scale, unit = (1.0, "s") if begin[-1] >= 10 else (1e3, "ms")
        return cls(
            program,
            str(mesh or "no mesh"),
            [time * scale for time in begin],
            {at: (start * scale, stop * scale) for at, (start, stop) in sent.items()},
            unit,
            memory_analysis(program, axes).live_bytes,
        )


def _clock(
    program: Program, hw: Hardware, axes: Mapping[str, int]
) -> tuple[list[float], dict[int, tuple[float, float]]]:
    """Runs the two queues of the cost model and notes when each op has its turn."""
    now = network_free = 0.0
    begin: list[float] = []
    sent: dict[int, tuple[float, float]] = {}
    done: dict[int, float] = {}
    for at, op in enumerate(program.ops):
        begin.append(now)
        seconds = op_seconds(op, program, hw, axes)
        if isinstance(op, Wait):
            now = max(now, done[op.token])
        elif isinstance(op, Gather | Reduce | Collective | Status):
            start = max(now, network_free)
            network_free = start + seconds
            sent[at] = start, network_free
            if isinstance(op, Gather | Reduce):
                done[op.token] = network_free
            else:
                now = network_free
        else:
            now += seconds
    return [*begin, now], sent


def _phases(plan: _Plan) -> Iterator[tuple[str, float, float]]:
    """Phase, begin and end of each stretch of compute; a wait ends a stretch."""
    open_phase, start, stop = "", 0.0, 0.0
    for at, op in enumerate(plan.program.ops):
        begin, end = plan.begin[at], plan.begin[at + 1]
        if not isinstance(op, Compute | Update) or end == begin:
            continue
        phase = op.phase if isinstance(op, Compute) else "update"
        phase = open_phase or "forward" if phase == "derive" else phase
        if phase == open_phase and begin <= stop:
            stop = end
            continue
        if open_phase:
            yield open_phase, start, stop
        open_phase, start, stop = phase, begin, end
    if open_phase:
        yield open_phase, start, stop


@dataclasses.dataclass(frozen=True, slots=True)
class _Bar:
    """One stretch of a leaf's row."""

    leaf: int
    start: float
    stop: float
    colour: str


def _bars(plan: _Plan) -> list[_Bar]:
    """Every gather on its way, every copy that is held, every reduce on its way."""
    owner = [value.owner for value in plan.program.values]
    arrives: dict[int, float] = {}
    copies: dict[int, tuple[int, float]] = {}
    bars: list[_Bar] = []
    for at, op in enumerate(plan.program.ops):
        if isinstance(op, Gather | Reduce):
            start, arrives[op.token] = plan.begin[at], plan.sent[at][1]
            colour = _TRAVELS if isinstance(op, Gather) else _REDUCES
            bars += [_Bar(leaf, start, arrives[op.token], colour) for leaf in op.leaves]
        if isinstance(op, Gather):
            pairs = zip(op.leaves, op.outs, strict=True)
            copies |= {owner[out]: (leaf, arrives[op.token]) for leaf, out in pairs}
        elif isinstance(op, Free):
            for value in {owner[value] for value in op.values} & copies.keys():
                leaf, start = copies.pop(value)
                bars.append(_Bar(leaf, start, plan.begin[at], _HELD))
    return bars


def _draw_timeline(axes: Axes, plan: _Plan) -> None:
    bars = _bars(plan)
    first = {bar.leaf: None for bar in bars}
    row = {leaf: place + 2 for place, leaf in enumerate(first)}
    for phase, start, stop in _phases(plan):
        axes.axvspan(start, stop, color=_PHASES[phase], alpha=0.35, lw=0)
        _bar(axes, 0, start, stop, _PHASES[phase])
    for at, (start, stop) in plan.sent.items():
        colour = _REDUCES if isinstance(plan.program.ops[at], Reduce | Status) else _TRAVELS
        _bar(axes, 1, start, stop, colour)
    for bar in bars:
        _bar(axes, row[bar.leaf], bar.start, bar.stop, bar.colour)
    names = ["compute", "network", *(short_path(plan.program.leaves[leaf]) for leaf in first)]
    each = 1 if len(names) <= _MAX_LABELS else -(-len(names) // _MAX_LABELS)
    shown = [0, 1, *range(2, len(names), each)]
    axes.set_yticks(shown, [names[i] for i in shown], fontsize=6)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axhline(1.5, color="black", lw=0.5)
    axes.tick_params(axis="y", length=0)
    _key(axes, plan)


def _bar(axes: Axes, row: int, start: float, stop: float, colour: str) -> None:
    axes.barh(row, stop - start, left=start, height=0.72, color=colour, lw=0)


def _key(axes: Axes, plan: _Plan) -> None:
    """What the colours mean, outside the plot."""
    from matplotlib.patches import Patch

    seen = {phase for phase, _, _ in _phases(plan)}
    meanings = {name: colour for name, colour in _PHASES.items() if name in seen}
    if any(isinstance(op, Gather) for op in plan.program.ops):
        meanings |= {"gather travels": _TRAVELS, "copy held": _HELD}
    if any(isinstance(op, Reduce) for op in plan.program.ops):
        meanings["gradient reduced"] = _REDUCES
    patches = [Patch(color=colour, label=name) for name, colour in meanings.items()]
    axes.legend(
        handles=patches, fontsize=6, ncols=len(patches), loc="lower right",
        bbox_to_anchor=(1.0, 1.0), frameon=False, handlelength=1.2, columnspacing=1.0,
    )  # fmt: skip


def _draw_memory(axes: Axes, plan: _Plan) -> None:
    live = [*plan.live_bytes, plan.live_bytes[-1] if plan.live_bytes else 0]
    peak, limit = max(live), plan.program.limit_bytes
    scale, unit = _unit(peak)
    heights = [nbytes / scale for nbytes in live]
    axes.fill_between(plan.begin, heights, step="post", color=_TRAVELS, lw=0)
    axes.step(plan.begin, heights, where="post", color=_HELD, lw=0.8)
    at = plan.begin[live.index(peak)]
    axes.plot(at, peak / scale, "o", color=_REDUCES, ms=4)
    _note(axes, f"peak {bytes_text(peak)}", at, peak / scale, right=at > plan.begin[-1] / 2)
    top = peak
    if limit is not None:
        near = limit <= 2 * peak
        top = max(peak, limit) if near else peak
        if near:
            axes.axhline(limit / scale, color="black", lw=0.8, ls="--")
            _note(axes, f"budget {bytes_text(limit)}", 0.0, limit / scale, right=False)
        else:
            text = f"budget {bytes_text(limit)}, far above"
            axes.text(0.01, 0.93, text, transform=axes.transAxes, fontsize=6, va="top")
    axes.set_ylim(0, max(top / scale, 1e-9) * 1.25)
    axes.set_ylabel(f"live bytes ({unit})", fontsize=7)
    axes.tick_params(labelsize=6)


def _note(axes: Axes, text: str, x: float, y: float, *, right: bool) -> None:
    shift, side = (-4, "right") if right else (4, "left")
    axes.annotate(text, (x, y), xytext=(shift, 3), textcoords="offset points", fontsize=6, ha=side)


def _label_time(axes: Axes, plan: _Plan) -> None:
    axes.set_xlim(0, max(plan.begin[-1], 1e-9))
    axes.set_xlabel(f"modelled time ({plan.unit})", fontsize=7)
    axes.tick_params(axis="x", labelsize=6)


def _unit(nbytes: int) -> tuple[float, str]:
    """The unit in which `bytes_text` prints a number of bytes."""
    text = bytes_text(nbytes).lstrip("0123456789.")
    return {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[text], text


def _title(plan: _Plan) -> str:
    return f"{plan.program.name}, {plan.program.mode} on {plan.mesh}"


def _rows_height(plan: _Plan) -> float:
    """Inches for one row per leaf and the two queues."""
    leaves = {bar.leaf for bar in _bars(plan)}
    return min(max(1.4, 0.14 * (len(leaves) + 2) + 0.4), 8.0)


def _figure(height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "zfunc.report draws with matplotlib, which is not installed\n"
            "  do        pip install 'zfunc[examples]'"
        ) from error
    return Figure(figsize=(8.0, height), dpi=150, layout="constrained")


def _saved(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        figure.savefig(path)
    return figure
