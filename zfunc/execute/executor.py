"""The executor: one loop over the program, one method per op.

It knows nothing of models, optimizers or schedules: it binds inputs, performs ops in order and
hands back what the program names as outputs. A rank that fails in the middle of a step performs the
remaining communication (its own shards, zeros for what it could not compute), so that no other rank
waits for it, and says so in the status.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import RankLostError
from zfunc.execute import status
from zfunc.execute.interrupt import Interrupts, deferred_interrupts
from zfunc.execute.segments import Segment, compile_segments
from zfunc.meshes import Handle, Mesh
from zfunc.program.ir import (
    Accumulate,
    Call,
    Collective,
    Free,
    Gather,
    Op,
    Program,
    Reduce,
    Rng,
    Status,
    Update,
    Wait,
    writes,
)

__all__ = ["Executor", "Frame", "Inputs", "Outcome"]


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What a program is run on.

    Attributes:
        leaves: this rank's piece of each leaf (the whole of a resident one).
        micros: the tensors of each micro-batch, pieces of `Sharded` arguments among them.
        keys: the folded key of each micro-batch, or None.
        update: called with the reduced gradients and the verdict where the program says `update`.
        call: called with the whole leaves and the micro-batch's number where the program says
            `call`; returns what the op names, in order, and aux.
        threads: threads of native kernels.
    """

    leaves: Sequence[Tensor]
    micros: Sequence[Sequence[Tensor]]
    keys: Sequence[Tensor | None]
    update: Callable[[list[Tensor | None], status.Verdict], None] | None = None
    call: Callable[[list[Tensor], int], tuple[list[Tensor], Any]] | None = None
    threads: int = 1
    scale: float = 1.0


@dataclasses.dataclass(slots=True)
class Frame:
    """The state of one run.

    Attributes:
        env: the living values.
        handles: collectives in flight.
        generators: recorded generator states by slot.
        waited_s: seconds spent waiting for collectives.
        error: what this rank raised, once it has.
        aux: what called functions returned besides, per micro-batch.
        verdict: what the status op found.
        total_weight: the divisor of the objective, once it is known.
        interrupts: what has arrived of SIGINT.
    """

    env: list[Any]
    inputs: Inputs
    handles: dict[int, Handle] = dataclasses.field(default_factory=dict)
    generators: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    saved_generator: Tensor | None = None
    waited_s: float = 0.0
    error: BaseException | None = None
    verdict: status.Verdict | None = None
    total_weight: float | None = None
    interrupts: Interrupts = dataclasses.field(default_factory=Interrupts)
    aux: dict[int, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a run leaves behind.

    Attributes:
        env: the values that the program names as outputs are still in it.
        verdict: what the status op found; None in mode "forward".
        error: what this rank raised before the status op, or None.
        total_weight: the number of losses, or the total weight of weighted ones; None without.
        waited_s: seconds spent waiting for collectives (exposed communication).
        aux: what called functions returned besides, per micro-batch.
    """

    env: list[Any]
    verdict: status.Verdict | None
    error: BaseException | None
    total_weight: float | None
    waited_s: float
    aux: Mapping[int, Any]


class Executor:
    """Runs one program on one rank, any number of times."""

    def __init__(self, program: Program, mesh: Mesh, *, max_segment_ops: int | None = None):
        self.program = program
        self.mesh = mesh
        self.schedule = compile_segments(program, max_ops=max_segment_ops)
        self.grad_layouts = [
            leaf.layouts.opt if program.mode == "step" else leaf.layouts.grads
            for leaf in program.leaves
            if leaf.trainable
        ]
        self._methods: Mapping[type, Callable[[Frame, Any], None]] = {
            Segment: self.segment,
            Gather: self.gather,
            Reduce: self.reduce,
            Wait: self.wait,
            Free: self.free,
            Accumulate: self.accumulate,
            Collective: self.collective,
            Call: self.call,
            Rng: self.rng,
            Status: self.status,
            Update: self.update,
        }

    def run(self, inputs: Inputs) -> Outcome:
        """Runs the program.

        Raises:
            RankLostError: another rank is gone.
            Exception: what a segment or the update raised, if there is no status op after it.
        """
        frame = self.bind(inputs)
        try:
            with self._modes(), deferred_interrupts() as frame.interrupts:
                for item in self.schedule:
                    self.perform(frame, item)
        except BaseException:
            self.abandon(frame)
            raise
        return Outcome(
            frame.env, frame.verdict, frame.error, frame.total_weight, frame.waited_s, frame.aux
        )

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        """The graph holds derivatives and casts already; a called function has those around it."""
        calls = any(isinstance(item, Call) for item in self.schedule)
        autocast = torch.is_autocast_enabled(self.mesh.device.type) and not calls
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if autocast:
                stack.enter_context(torch.autocast(self.mesh.device.type, enabled=False))
            yield

    def bind(self, inputs: Inputs) -> Frame:
        """Places the inputs in a new environment."""
        env: list[Any] = [None] * len(self.program.values)
        for leaf, local in zip(self.program.leaves, inputs.leaves, strict=True):
            if leaf.resident:
                env[leaf.full] = local.view(leaf.spec.shape)
        for micro, tensors, key in zip(
            self.program.micros, inputs.micros, inputs.keys, strict=True
        ):
            for value, tensor in zip(micro.inputs, tensors, strict=True):
                env[value] = tensor
            if micro.key is not None:
                env[micro.key] = key
        for value, tensor in self.program.constants.items():
            env[value] = tensor
        return Frame(env, inputs)

    def perform(self, frame: Frame, item: Op | Segment) -> None:
        """Performs one item of the schedule, or its communication alone after a failure."""
        method = self._methods[type(item)]
        if frame.verdict is not None:
            method(frame, item)
            return
        computes = isinstance(item, Segment | Call | Rng | Accumulate)
        if computes and frame.error is not None:
            return
        try:
            if isinstance(item, Segment | Call):
                with frame.interrupts.heard():
                    method(frame, item)
            else:
                if frame.error is None:
                    frame.interrupts.raise_arrived()
                method(frame, item)
        except RankLostError:
            raise
        except BaseException as error:
            self.fail(frame, error)
            if not computes:
                method(frame, item)

    def fail(self, frame: Frame, error: BaseException) -> None:
        """Notes this rank's failure; peers are sent zeros for what is dropped here.

        Alone, or at the second failure, there is nothing to go on for.
        """
        if self.mesh.comm is None or frame.error is not None:
            raise error
        frame.error = error
        frame.env[:] = [None] * len(frame.env)
        self._restore(frame)

    def segment(self, frame: Frame, item: Segment) -> None:
        item.run(frame.env)

    def gather(self, frame: Frame, op: Gather) -> None:
        fulls = [self._empty(out) for out in op.outs]
        shards = [
            frame.inputs.leaves[leaf].to(full.dtype)
            for leaf, full in zip(op.leaves, fulls, strict=True)
        ]
        assert self.mesh.comm is not None
        frame.handles[op.token] = self.mesh.comm.gather(
            op.axis, shards, [full.view(-1) for full in fulls]
        )
        for out, full in zip(op.outs, fulls, strict=True):
            frame.env[out] = full

    def reduce(self, frame: Frame, op: Reduce) -> None:
        sources = [self._value(frame, value).view(-1) for value in op.ins]
        sums = [self._empty(out) for out in op.outs]
        assert self.mesh.comm is not None
        call = self.mesh.comm.reduce if op.scatter else self.mesh.comm.all_reduce
        frame.handles[op.token] = call(op.axis, sources, [out.view(-1) for out in sums])
        for out, total in zip(op.outs, sums, strict=True):
            frame.env[out] = total

    def wait(self, frame: Frame, op: Wait) -> None:
        start = time.perf_counter()
        frame.handles[op.token].wait()
        del frame.handles[op.token]
        frame.waited_s += time.perf_counter() - start

    def free(self, frame: Frame, op: Free) -> None:
        for value in op.values:
            frame.env[value] = None

    def accumulate(self, frame: Frame, op: Accumulate) -> None:
        env = frame.env
        into, ins = [env[value] for value in op.into], [env[value] for value in op.ins]
        torch._foreach_add_(into, ins)  # pyright: ignore

    def collective(self, frame: Frame, op: Collective) -> None:
        source = self._value(frame, op.source)
        out = self._empty(op.out)
        flat = source.contiguous().view(-1)
        if self.mesh.axis_size(op.axis) == 1:
            out.view(-1).copy_(flat)
        else:
            assert self.mesh.comm is not None
            call = self.mesh.comm.gather if op.name == "gather" else self.mesh.comm.reduce
            call(op.axis, [flat], [out.view(-1)]).wait()
        frame.env[op.out] = out

    def call(self, frame: Frame, op: Call) -> None:
        assert frame.inputs.call is not None
        made, frame.aux[op.micro] = frame.inputs.call(
            [frame.env[leaf] for leaf in op.leaves], op.micro
        )
        for out, tensor in zip(writes(op), made, strict=True):
            frame.env[out] = tensor

    def rng(self, frame: Frame, op: Rng) -> None:
        if op.action == "record":
            frame.generators[op.slot] = self._generator.get_state()
        elif op.action == "replay":
            frame.saved_generator = self._generator.get_state()
            self._generator.set_state(frame.generators[op.slot])
        else:
            self._restore(frame)

    def status(self, frame: Frame, op: Status) -> None:
        if frame.total_weight is None:
            frame.total_weight = self._total(frame, op)
        own = status.failure(len(op.grads))
        if frame.error is None:
            own = self._report(frame, op, frame.total_weight)
        frame.verdict = status.agree(self.mesh, own, self.grad_layouts)

    def update(self, frame: Frame, op: Update) -> None:
        assert frame.inputs.update is not None and frame.verdict is not None
        # A total weight of 0 leaves nothing to divide by: the step is skipped whatever is allowed.
        if not frame.verdict.failed_ranks and frame.total_weight:
            grads = [None if grad is None else frame.env[grad] for grad in op.grads]
            frame.inputs.update(grads, frame.verdict)

    def abandon(self, frame: Frame) -> None:
        """Leaves nothing in flight when a run ends early; buffers live until then."""
        if self.mesh.comm is not None:
            self.mesh.comm.drain()
        frame.handles.clear()
        self._restore(frame)

    def _restore(self, frame: Frame) -> None:
        if frame.saved_generator is not None:
            self._generator.set_state(frame.saved_generator)
            frame.saved_generator = None

    @property
    def _generator(self) -> torch.Generator:
        """The generator that operators draw from on this mesh's device."""
        device = self.mesh.device
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            return torch.cuda.default_generators[index]
        return torch.default_generator

    def _report(self, frame: Frame, op: Status, total_weight: float) -> status.Report:
        """Divides the gradients by the number of losses (or total weight) and the scale."""
        grads = [None if grad is None else frame.env[grad] for grad in op.grads]
        present = [grad for grad in grads if grad is not None]
        divisor = total_weight * frame.inputs.scale
        if present and divisor not in (0.0, 1.0):
            torch._foreach_div_(present, divisor)  # pyright: ignore
        loss = sum(float(frame.env[value]) for value in op.losses)
        own = status.report(loss, grads, frame.inputs.threads)
        empty = bool(op.weights) and total_weight == 0.0
        return dataclasses.replace(own, nonfinite=own.nonfinite or empty)

    def _total(self, frame: Frame, op: Status) -> float:
        """The divisor of the objective: all losses of all ranks, or their total weight."""
        if not op.weights:
            return float(self.mesh.size * len(op.losses))
        weight = 0.0 if frame.error else sum(float(frame.env[value]) for value in op.weights)
        return status.agree(self.mesh, status.Report(False, False, weight, ()), ()).loss

    def _empty(self, value: int) -> Tensor:
        spec = self.program.values[value].spec
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.mesh.device)

    def _value(self, frame: Frame, value: int) -> Tensor:
        """A value, or zeros in its place on a rank that failed before it was made."""
        if frame.error is None or frame.env[value] is not None:
            return frame.env[value]
        spec = self.program.values[value].spec
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self.mesh.device)
