"""`shard`: a loss becomes a sharded training step, `state, metrics = step(state, batch)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from zfunc.adopt import adopt
from zfunc.comm import as_mesh
from zfunc.errors import LayoutError, check_count, explain
from zfunc.explain import Explanation, explain_programs
from zfunc.init import abstract_state, init_state
from zfunc.layout import zero
from zfunc.lowered import Lowered, lower
from zfunc.meshes import Mesh
from zfunc.policy import Policy
from zfunc.precision import loss_scale_of, with_precision
from zfunc.programs import Programs
from zfunc.rematerialise import remat as rematerialised
from zfunc.scaling import LossScale
from zfunc.settings import Capture, Options, Prefetch
from zfunc.state import State
from zfunc.training import Training, gradients, run_step

__all__ = ["Step", "shard"]


def shard(
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    *,
    specs: Any = zero(3),  # noqa: B008
    trainable: Any = True,
    precision: Any = None,
    remat: Policy | None = None,
    prefetch: Prefetch = Prefetch(),  # noqa: B008
    accum: int = 1,
    has_aux: bool = False,
    nonfinite: str = "skip",
    capture: Capture | str = "auto",
    donate: bool = True,
) -> Step:
    """Transforms a loss into a sharded training step (ZeRO; Rajbhandari et al. 2020, section 5).

    The objective is the mean of the loss over all ranks and micro-batches. A loss may return
    `(sum, weight)` instead; the objective is then the total sum over the total weight.

    Args:
        loss_fn: a pure function `loss_fn(params, batch)`, or with a keyword argument `key`, of
            whole parameters and this rank's batch. Returns a 0-d floating tensor, or
            `(sum, weight)`; with `has_aux` a pair of that and any tree.
        mesh: from `zfunc.mesh`, `local_mesh` or `abstract_mesh`, or torch's `DeviceMesh`.
        specs: how leaves are cut: a prefix tree of specs, or a mapping by class (`zero(1)`).
        trainable: a prefix tree of bools; what is False has no gradient and no optimizer state.
        precision: the dtypes of leaves, computation, reduction, batch and output: a `Precision`,
            its name ("bf16"), or a prefix tree of those; None keeps every dtype.
        remat: what to keep of the whole loss, one of `policies`; the rest is computed again in the
            backward pass. None keeps all that it needs.
        prefetch: the byte budgets.
        accum: micro-batches per step; the batch is then a list of that many.
        has_aux: whether the loss returns `(loss, aux)`.
        nonfinite: "skip" leaves a step out whose loss or gradient is not finite, "raise" raises
            `NonFiniteError`, "ignore" applies it.
        capture: "traced" makes a graph of the loss; "dynamic" calls it as it is, between a gather
            of all parameters and a reduce of all gradients; "auto" traces, and calls what cannot be
            traced if that fits the budget; or a `Capture`.
        donate: whether a step writes into the state that it takes, whose use is then an error.

    Returns:
        The step.

    Raises:
        LayoutError: an option is not one of those above.

    Example:
        >>> import torch, zfunc
        >>> from zfunc import optim
        >>> step = shard(lambda p, b: ((b @ p["w"]) ** 2).mean(), zfunc.mesh())
        >>> state = step.init({"w": torch.ones(2, 1)}, optim.sgd(0.1))
        >>> state, metrics = step(state, torch.eye(2))
        >>> metrics["loss"].item()
        1.0
    """
    if nonfinite not in ("skip", "raise", "ignore"):
        raise LayoutError(
            explain(f"shard(nonfinite={nonfinite!r})", expected="'skip', 'raise' or 'ignore'")
        )
    check_count("shard(accum=)", accum, 1, "micro-batches")
    function = loss_fn if remat is None else rematerialised(loss_fn, remat)
    function = with_precision(function, precision, loss=True, has_aux=has_aux)
    scale = loss_scale_of(precision)
    if isinstance(scale, LossScale) and nonfinite != "skip":
        raise LayoutError(
            explain(
                f"shard(nonfinite={nonfinite!r}) with a dynamic loss scale",
                expected="'skip': a scale that is too large is found by steps that are left out",
            )
        )
    options = Options(specs, trainable, precision, accum, has_aux, nonfinite, donate, scale)
    mesh = as_mesh(mesh)
    return Step(Training(mesh, options, Programs(function, mesh, prefetch, capture), {}))


class Step:
    """A pure training step; made by `shard`."""

    def __init__(self, training: Training):
        self._training = training

    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        """Runs one step: forward, backward, update.

        Args:
            state: from `init`, `adopt` or the last call; consumed unless `donate=False`.
            batch: this rank's part, any tree; with `accum=n` a list of n.

        Returns:
            The next state, and metrics: `loss grad_norm grad_norm_clipped lr skipped loss_scale
            exposed_communication_s` as 0-d tensors (`lr` a dict with `partition`), and `aux`.

        Raises:
            RemoteRankError: another rank raised; the state is still valid.
            ProgramMismatchError: ranks differ in program, options or step; the state is valid.
            NonFiniteError: with `nonfinite="raise"`; the state is valid.
            DonatedStateError: the state was consumed before.
            RankLostError: a rank is gone: terminal.
        """
        return run_step(self._training, state, batch)

    def init(self, params_or_fn: Any, tx: Any, *, key: Tensor | None = None) -> State:
        """Makes the first state.

        Args:
            params_or_fn: a tree that every rank holds whole, of which each takes its own pieces
                (checksums are compared), or a function that makes it: `init_fn(key)` if it takes a
                parameter, else `init_fn()`. A function is run leaf by leaf, and what
                `checkpoint.load_safetensors` returns is read so: the full model never exists on
                one rank.
            tx: the optimizer.
            key: int64 [2]; split into the key of `init_fn` and `State.key`.

        Returns:
            The state at step 0.

        Raises:
            LayoutError: a leaf differs between ranks or does not fit its spec; names it.
        """
        return init_state(self._training, params_or_fn, tx, key)

    def abstract(self, params_or_fn: Any, tx: Any, *, key: Tensor | None = None) -> State:
        """The state that `init` would make, with `ShapeDtype` in place of every tensor."""
        return abstract_state(self._training, params_or_fn, tx, key)

    def value_and_grad(self, params: Any, batch: Any, *, key: Tensor | None = None) -> Any:
        """The global mean loss and its gradients, for update loops written by hand.

        Args:
            params: a tree of `Sharded` leaves, such as `state.params`; not consumed.
            batch: as for a call.
            key: for a loss that takes one.

        Returns:
            `(loss, grads)`, or `((loss, aux), grads)` with `has_aux`. Gradients are `Sharded` by
            the grads spec: zeros for leaves that the loss does not use, None for frozen ones.
        """
        return gradients(self._training, params, batch, key)

    def adopt(self, state: State) -> State:
        """Brings the state of another step over to this one: other specs, axes or trainable leaves.

        The old state is consumed unless `donate=False`. Newly trained leaves start their
        count of updates at 0.

        Raises:
            LayoutError: the state belongs to other processes.
        """
        return adopt(self._training, state)

    def lower(self, state_like: State, batch_like: Any) -> Lowered:
        """Captures and plans without running; needs no process group.

        Args:
            state_like: a state, or what `abstract` returns.
            batch_like: a batch, or the same tree of `ShapeDtype`.
        """
        return lower(self._training, state_like, batch_like)

    def explain(self) -> Explanation:
        """How the loss was captured, what is kept and gathered again, hits and misses."""
        return explain_programs(self._training.programs)
