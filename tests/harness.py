"""What several tests of steps need: virtual ranks, plans under tight budgets, comparisons."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from hypothesis import Phase, settings
from torch import Tensor

import zfunc
import zfunc.resolve
from tests.checker import check_stage
from tests.equivalence import Names
from zfunc import tree
from zfunc.passes import build, stages
from zfunc.program.ir import Program
from zfunc.program.memory import memory_analysis
from zfunc.programs import Programs
from zfunc.sharded import is_sharded
from zfunc.step import Step

__all__ = [
    "Plan",
    "assert_equal",
    "bits",
    "checked",
    "checked_unions",
    "examples",
    "gathered",
    "integers",
    "planned",
    "ranks",
    "tight",
]

Plan = Callable[..., Program]


def examples(share: float) -> settings:
    """Settings for a property whose examples are dear: a part of the profile's number of them.

    Only the profile `soak` shrinks a failure, which would take longer than a test may: the example
    is printed as it is, and is tried again first in the next run.
    """
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    if settings.get_current_profile_name() == "soak":
        phases.append(Phase.shrink)
    return settings(max_examples=max(1, int(share * settings().max_examples)), phases=phases)


def ranks(axes: int | Mapping[str, int], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls `fn(mesh, *args)` on virtual ranks."""
    return zfunc.local_mesh(axes).run(fn, *args)


def planned(step: Step, plan: Plan) -> Step:
    """The same step with another plan in place of `build`."""
    training = step._training
    old = training.programs
    programs = Programs(old.function, old.mesh, old.prefetch, old.capture, plan)
    return Step(dataclasses.replace(training, programs=programs, tables={}))


def checked(**options: Any) -> Plan:
    """The pipeline under some options; the program after every pass goes to the checker."""

    def plan(captured: Sequence[Program], mesh: zfunc.Mesh, **given: Any) -> Program:
        before: Any = captured
        names = Names()
        for name, program in stages(captured, mesh, **(given | options)):
            check_stage(program, name, before=before, names=names)
            before = program
        return before

    return plan


@contextlib.contextmanager
def checked_unions(**options: Any) -> Iterator[None]:
    """Where ranks unite their programs: under some options, checked after every pass."""

    def checked_stages(micros: Sequence[Program], mesh: zfunc.Mesh, **given: Any) -> Any:
        before: Any = micros
        names = Names()
        for name, program in stages(micros, mesh, **(given | options)):
            check_stage(program, name, before=before, names=names)
            before = program
            yield name, program

    with mock.patch.object(zfunc.resolve, "stages", checked_stages):
        yield


def tight(fraction: float, **options: Any) -> Plan:
    """The pipeline, checked, under a budget between the smallest feasible one and what it wants.

    Args:
        fraction: 0 for the smallest feasible budget, 1 for the peak of an ample one.
        options: further options of `build`.
    """

    def plan(captured: Sequence[Program], mesh: zfunc.Mesh, **given: Any) -> Program:
        limit = None
        if fraction < 1:
            limit = smallest_budget(captured, mesh, **(given | options))
        if limit is not None and fraction > 0:
            ample = build(captured, mesh, **(given | options))
            most = memory_analysis(ample, dict(mesh.axes)).peak_live_bytes
            limit += int(fraction * max(0, most - limit))
        return checked(**(options | {"live_bytes": limit}))(captured, mesh, **given)

    return plan


def smallest_budget(captured: Sequence[Program], mesh: zfunc.Mesh, **settings: Any) -> int:
    """The smallest feasible budget, as the error about a smaller one names it."""
    try:
        build(captured, mesh, **(settings | {"live_bytes": 0}))
    except zfunc.BudgetError as error:
        return error.needed_bytes
    return 0


def integers(generator: torch.Generator, shape: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers, exact in any dtype."""
    return torch.randint(-3, 4, tuple(shape), generator=generator).to(dtype)


def gathered(nodes: Any) -> list[Tensor]:
    """Copies of the whole tensors of a tree of `Sharded` leaves, in canonical order."""
    whole = zfunc.gather(nodes)
    return [leaf.clone() for leaf in tree.leaves(whole) if isinstance(leaf, Tensor)]


def bits(nodes: Any) -> list[Tensor]:
    """Copies of this rank's pieces, of every tensor of a tree."""
    leaves = tree.leaves(nodes, is_leaf=is_sharded)
    tensors = [leaf.local if is_sharded(leaf) else leaf for leaf in leaves]
    return [x.clone() for x in tensors if isinstance(x, Tensor)]


def assert_equal(
    got: Sequence[Tensor | None], expected: Sequence[Tensor | None], tol: float = 0.0
) -> None:
    """Compares lists of tensors: bit for bit, or within a bound relative to the largest value."""
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a is None or b is None:
            assert a is None and b is None, f"leaf {index}: {a} against {b}"
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"leaf {index}: {a} against {b}"
        if tol == 0.0 or not (a.is_floating_point() or a.is_complex()):
            assert torch.equal(a, b), f"leaf {index}: {a} against {b}"
        elif a.numel():
            scale = max(1.0, float(b.abs().max()))
            off = float((a - b).abs().max()) / scale
            assert off <= tol, f"leaf {index}: off by {off}"
