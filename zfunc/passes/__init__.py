"""The passes, pure functions Program -> Program, and the one pipeline that lists them.

capture -> remat -> accumulate -> derive -> pack -> order -> prefetch. A pass sees frozen data and
byte budgets: no communication, no files, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zfunc.meshes import Mesh
from zfunc.passes.accumulate import accumulate
from zfunc.passes.buckets import BUCKET_BYTES
from zfunc.passes.derive import derive
from zfunc.passes.order import order
from zfunc.passes.pack import pack_reuse
from zfunc.passes.prefetch import prefetch
from zfunc.passes.remat import rematerialise
from zfunc.program.cost import op_seconds
from zfunc.program.ir import Op, Program

__all__ = ["build", "stages"]


def stages(
    captured: Sequence[Program],
    mesh: Mesh,
    *,
    update: bool,
    live_bytes: int | None = None,
    ahead_bytes: int | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    leaf_order: Sequence[int] | None = None,
    grad_order: Sequence[int] | None = None,
) -> Iterator[tuple[str, Program]]:
    """Runs the pipeline and yields the program after each pass.

    Args:
        captured: one captured program per micro-batch.
        mesh: its axes, and the rates that the cost model reads.
        update: whether an optimizer update follows.
        live_bytes: the budget of live bytes; None means a quarter of the device's memory, or what
            is needed if that is more.
        ahead_bytes: see `order`.
        bucket_bytes: see `buckets`.
        leaf_order: see `buckets`.
        grad_order: see `accumulate`.

    Yields:
        The name of each pass and the program after it.

    Raises:
        BudgetError: some op needs more than `live_bytes` by itself, or a `remat` region more than
            its own budget.
    """
    sizes = dict(mesh.axes)
    micros = [rematerialise(program, mesh.hw, sizes) for program in captured]
    program = accumulate(
        micros,
        mesh,
        update=update,
        bucket_bytes=bucket_bytes,
        leaf_order=leaf_order,
        grad_order=grad_order,
    )
    yield "accumulate", program
    program = derive(program)
    yield "derive", program
    program = pack_reuse(
        program,
        sizes,
        live_bytes=live_bytes,
        floor_bytes=mesh.hw.device_bytes // 4,
        bucket_bytes=bucket_bytes,
        leaf_order=leaf_order,
    )
    yield "pack", program
    program = order(program, sizes, ahead_bytes=ahead_bytes)
    yield "order", program

    def seconds_of(op: Op, program: Program = program) -> float:
        return op_seconds(op, program, mesh.hw, sizes)

    yield "prefetch", prefetch(program, seconds_of)


def build(
    captured: Sequence[Program],
    mesh: Mesh,
    *,
    update: bool,
    live_bytes: int | None = None,
    ahead_bytes: int | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Program:
    """Runs the whole pipeline; see `stages`."""
    *_, (_, program) = stages(
        captured,
        mesh,
        update=update,
        live_bytes=live_bytes,
        ahead_bytes=ahead_bytes,
        bucket_bytes=bucket_bytes,
    )
    return program
