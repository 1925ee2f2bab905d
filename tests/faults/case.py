"""Small trainings to be disturbed, and the means to act at any op of a step.

Every kind of program has its case: ZeRO-3 under the smallest budget with two micro-batches, ZeRO-1,
a hybrid mesh, ranks that differ (a union), the dynamic rung. Data are small integers, so that what
comes after a fault can be compared bit for bit with a dense run that had none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import zfunc
from tests.harness import gathered, integers, planned, smallest_budget, tight
from tests.oracle import Oracle, Sgd
from zfunc import optim
from zfunc.execute import Executor
from zfunc.passes import build
from zfunc.program.ir import Program, Status

__all__ = ["CASES", "Case", "Training", "act_at", "expected", "fault", "report"]

RATE = 2.0**-10
BUCKET_BYTES = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """A training to be disturbed.

    Attributes:
        axes: the axes of the mesh.
        specs: what `shard` takes.
        accum: micro-batches.
        live_bytes: None for an ample budget, "least" for the smallest that is feasible.
        apart: whether ranks take different branches.
        dynamic: whether Python looks at values.
        whole: whether gradients are whole on every rank.
    """

    axes: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"shard": 2})
    specs: Any = dataclasses.field(default_factory=lambda: zfunc.zero(3))
    accum: int = 1
    live_bytes: str | None = None
    apart: bool = False
    dynamic: bool = False
    whole: bool = False

    @property
    def world(self) -> int:
        """The number of ranks."""
        size = 1
        for ranks in self.axes.values():
            size *= ranks
        return size


CASES = {
    "tight": Case(accum=2, live_bytes="least"),
    "zero 1": Case(specs=zfunc.zero(1), whole=True),
    "hybrid": Case(axes={"replica": 2, "shard": 2}),
    "apart": Case(apart=True),
    "dynamic": Case(dynamic=True),
}


def _unchecked(captured: Any, mesh: zfunc.Mesh, **given: Any) -> Program:
    settings: dict[str, Any] = given | {"bucket_bytes": BUCKET_BYTES}
    limit = smallest_budget(captured, mesh, **settings)
    return build(captured, mesh, **(settings | {"live_bytes": limit}))


def loss(params: Any, batch: Any) -> Tensor:
    """Reused and tied leaves; a branch by the batch; with "look" one by a value."""
    h = (batch["x"] @ params["embed"]).clamp(-8, 8)
    if batch["branch"]:
        h = torch.relu(h @ params["even"]).clamp(-8, 8)
    else:
        h = (h @ params["odd"]).clamp(-8, 8)
    if batch["look"] and float(h.detach().sum()) < -1e9:
        h = -h
    return ((h @ params["last"]) ** 2).sum() + (h @ params["embed"].t()).sum()


def params() -> Any:
    generator = torch.Generator().manual_seed(3)
    shapes = {"embed": (6, 5), "even": (5, 5), "odd": (5, 5), "last": (5, 2), "unused": (3,)}
    return {name: integers(generator, shape) for name, shape in shapes.items()}


def batch(case: Case, rank: int, number: int) -> Any:
    """What a rank gets at a step."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    micros = [
        {
            "x": integers(generator, (2 + micro, 6)),
            "branch": bool(rank % 2) if case.apart else True,
            "look": case.dynamic,
        }
        for micro in range(case.accum)
    ]
    return micros if case.accum > 1 else micros[0]


def expected(case: Case, steps: int) -> list[list[Tensor]]:
    """The leaves after each step, from a dense run."""
    oracle = Oracle(loss, params(), Sgd(RATE), axes=case.axes, whole_grads=case.whole)
    seen = []
    for number in range(steps):
        rows = [batch(case, rank, number) for rank in range(case.world)]
        oracle.step(rows if case.accum > 1 else [[row] for row in rows])
        seen.append(oracle.tensors)
    return seen


class Training:
    """One rank's run of a case.

    Attributes:
        state: the newest.
    """

    def __init__(self, mesh: zfunc.Mesh, case: Case, *, checked: bool = True, **options: Any):
        """Makes the step and its state.

        Args:
            mesh: the mesh.
            case: the case.
            checked: whether programs under the smallest budget go to the checker.
            options: further options of `shard`.
        """
        self.mesh = mesh
        self.case = case
        self.run = step = zfunc.shard(loss, mesh, specs=case.specs, accum=case.accum, **options)
        if case.live_bytes == "least":
            plan = tight(0.0, bucket_bytes=BUCKET_BYTES) if checked else _unchecked
            self.run = planned(step, plan)
        self.state = self.run.init(params(), optim.sgd(RATE))

    @property
    def executor(self) -> Executor:
        """What ran last."""
        programs = self.run._training.programs
        return (programs.resolved.values() or programs.compiled)[-1].executor

    @property
    def commit_at(self) -> int:
        """The place of the status op in the schedule."""
        return next(i for i, op in enumerate(self.executor.schedule) if isinstance(op, Status))

    def step(self) -> None:
        """One step; the state is replaced only if it succeeds."""
        number = int(self.state.step)
        self.state, _ = self.run(self.state, batch(self.case, self.mesh.rank, number))

    def leaves(self) -> list[Tensor]:
        """The whole leaves."""
        return gathered(self.state.params)


def act_at(executor: Executor, at: int, act: Callable[[], object]) -> None:
    """Does something once, just before an item of the schedule is performed."""
    methods, place = dict(executor._methods), [0]

    def disturbed(kind: type) -> Callable[[Any, Any], None]:
        def perform(frame: Any, item: Any) -> None:
            place[0] += 1
            if place[0] == at + 1:
                executor._methods = methods
                act()
            methods[kind](frame, item)

        return perform

    executor._methods = {kind: disturbed(kind) for kind in methods}


def fault(message: str) -> Callable[[], object]:
    """Something that raises."""

    def act() -> None:
        raise ArithmeticError(message)

    return act


def report(run: Callable[[], object]) -> tuple[str, str]:
    """The name and text of what a call raises; empty if it returns."""
    try:
        run()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""
