"""`Lowered`: a program on paper, with its text, its bytes and its time, before anything has run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from zfunc import tree
from zfunc.meshes import Mesh
from zfunc.program.cost import Cost, cost_analysis
from zfunc.program.ir import Program
from zfunc.program.memory import Memory, memory_analysis
from zfunc.program.text import as_text
from zfunc.sharded import Sharded, is_sharded
from zfunc.state import State
from zfunc.training import Training, prepare

__all__ = ["Lowered", "lower"]


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """What `Step.lower` returns.

    Attributes:
        program: the program after all passes, as frozen data.
        mesh: the mesh that it was made for.
        opt_bytes: this rank's bytes of optimizer state.
        unsharded_opt_bytes: the same without sharding.
    """

    program: Program
    mesh: Mesh
    opt_bytes: int
    unsharded_opt_bytes: int

    def as_text(self, *, max_lines: int | None = None) -> str:
        """The program, one op a line, in the format that `zfunc.program.text` documents."""
        return as_text(self.program, max_lines=max_lines)

    def memory_analysis(self) -> Memory:
        """Bytes per rank: steady state, peak of live bytes, and the same without sharding."""
        return memory_analysis(
            self.program,
            dict(self.mesh.axes),
            opt_bytes=self.opt_bytes,
            unsharded_opt_bytes=self.unsharded_opt_bytes,
        )

    def cost_analysis(self) -> Cost:
        """FLOPs, bytes on the network and modelled seconds under the mesh's `Hardware`."""
        return cost_analysis(self.program, self.mesh.hw, dict(self.mesh.axes))


def lower(training: Training, state_like: State, batch_like: Any) -> Lowered:
    """Captures and plans a step without running it; see `Step.lower`."""
    ready = prepare(training, state_like.params, batch_like, None, 0, state=state_like, keys=False)
    local = whole = 0
    for leaf in tree.leaves(state_like.opt_state, is_leaf=is_sharded):
        if isinstance(leaf, Sharded):
            local += _nbytes(leaf.local)
            whole += leaf.layout.numel * leaf.dtype.itemsize
    return Lowered(ready.compiled.program, training.mesh, local, whole)


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
