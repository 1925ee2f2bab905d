"""Metrics: what a step tells about itself, and what is said of steps that are not finite."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from zfunc import optim
from zfunc.errors import explain
from zfunc.execute import Outcome, Verdict
from zfunc.meshes import Mesh
from zfunc.params import ParamTable
from zfunc.program.ir import Program

__all__ = ["mean_loss", "measured", "nonfinite_message", "warn_of_skips"]

_LOG = logging.getLogger("zfunc")
_SKIPS = 4  # in a row, before the first warning; the next ones at twice as many


def measured(
    program: Program,
    outcome: Outcome,
    verdict: Verdict,
    applied: optim.Applied,
    *,
    skipped: bool,
    scale: float,
) -> dict[str, Any]:
    """The metrics of a step but for its aux, as 0-d tensors.

    Args:
        program: what ran.
        outcome: what it left behind.
        verdict: what all ranks agreed on.
        applied: the rate and norm that the optimizer used.
        skipped: whether the step was left out.
        scale: the loss scale.
    """
    norm, clipped = math.sqrt(sum(verdict.squares)), applied.grad_norm_clipped
    return {
        "loss": mean_loss(program, outcome, verdict),
        "grad_norm": _scalar(norm),
        "grad_norm_clipped": _scalar(norm if clipped is None else clipped),
        "lr": _rates(applied.lr),
        "skipped": torch.tensor(int(skipped)),
        "loss_scale": _scalar(scale),
        "exposed_communication_s": _scalar(outcome.waited_s),
    }


def mean_loss(program: Program, outcome: Outcome, verdict: Verdict) -> Tensor:
    """The mean over all ranks and micro-batches, in the dtype of the loss."""
    total = outcome.total_weight
    mean = verdict.loss / total if total else math.nan
    first = program.micros[0].loss
    assert first is not None
    return torch.tensor(mean, dtype=outcome.env[first].dtype)


def nonfinite_message(table: ParamTable, verdict: Verdict, mean: float, what: str) -> str:
    """Says what is not finite, and where it was seen first."""
    bad = [
        table.slots[position].path
        for position, square in zip(table.trainable, verdict.squares, strict=True)
        if not math.isfinite(square)
    ]
    return explain(
        f"{what} is not finite: loss {mean}, gradients of {bad[:3] or 'no leaf'}",
        expected="finite loss and gradients",
        got=_first(table, verdict),
        do='the state from before is valid; nonfinite="skip" leaves such steps out',
    )


def warn_of_skips(mesh: Mesh, table: ParamTable, verdict: Verdict, skips: int, what: str) -> None:
    """Warns on rank 0 of steps in a row that were left out: after 4, 8, 16 and so on."""
    if mesh.rank == 0 and skips >= _SKIPS and skips & (skips - 1) == 0:
        first = _first(table, verdict)
        _LOG.warning("%s is the %dth in a row that is left out: %s", what, skips, first)


def _first(table: ParamTable, verdict: Verdict) -> str:
    """Names the rank and leaf where something was not finite first."""
    if verdict.suspect is None:
        return "the total weight is 0"
    rank, leaf = verdict.suspect
    if leaf is None:
        return f"the loss of rank {rank} first"
    return f"the gradient of {table.slots[table.trainable[leaf]].path} first, held by rank {rank}"


def _rates(rate: Any) -> Any:
    if isinstance(rate, dict):
        return {label: _scalar(value) for label, value in rate.items()}
    return _scalar(math.nan if rate is None else rate)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
