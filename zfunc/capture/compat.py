"""The names of torch that capture leans on and that are not, or not yet, public.

Tested against torch 2.13; everything that may move between releases is in this file. The
refusals below are what functorch says of functions that `torch.autograd.grad` can
differentiate: they choose the other derivation, anything else is the user's own error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_fake,
)
from torch.autograd.graph import _engine_run_backward
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DATA_DEPENDENT",
    "UNSUPPORTED",
    "Lines",
    "annotate",
    "declared",
    "fake_mode",
    "gradients",
    "has_derivative",
    "is_compiler_refusal",
    "is_fake",
    "is_fake_refusal",
    "is_functorch_refusal",
    "is_hook_refusal",
    "is_leaf_write",
    "names_of",
    "num_nodes",
    "regions_of",
    "to_graph",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
UNSUPPORTED = UnsupportedOperatorException

_HOOKS = "don't yet support saved tensor hooks"
_REFUSALS = (
    _HOOKS,
    "must override the setup_context staticmethod",
    "would mutate a captured Tensor",
    "attempting to call Tensor.requires_grad_()",
)
_COMPILED = "using FX to symbolically trace a dynamo-optimized function"
_TAG = "zfunc."


def is_functorch_refusal(error: BaseException) -> bool:
    """Whether functorch refused a function that plain autograd may still differentiate."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _REFUSALS)


def is_hook_refusal(error: BaseException) -> bool:
    """Whether functorch refused to run inside of `torch.utils.checkpoint`."""
    return isinstance(error, RuntimeError) and _HOOKS in str(error)


def is_compiler_refusal(error: BaseException) -> bool:
    """Whether torch's compiler refused to run inside of a trace: `torch.compile`, `torch.cond`."""
    name = type(error).__module__
    return name.startswith("torch._dynamo") or (
        isinstance(error, RuntimeError) and _COMPILED in str(error)
    )


def is_fake_refusal(error: BaseException) -> bool:
    """Whether a real tensor met the fake ones: the function captured it from outside."""
    return isinstance(error, AssertionError) and "convert all Tensors to FakeTensors" in str(error)


def is_leaf_write(error: BaseException) -> bool:
    """Whether autograd refused a write into a leaf that requires a gradient."""
    text = "leaf Variable that requires grad is being used in an in-place operation"
    return isinstance(error, RuntimeError) and text in str(error)


@contextlib.contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """A fake tensor mode that leaves reporting of the user's errors to the exception."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode() as mode, fx_traceback.preserve_node_meta():
            yield mode
    finally:
        logger.setLevel(level)


def to_graph(
    function: Any, *args: Any, on_draw: Callable[[Any, Any, Any], None] | None
) -> torch.fx.GraphModule:
    """Traces a function of flat tuples of fake tensors.

    Args:
        function: the function.
        args: its arguments.
        on_draw: called with every random operator and its arguments before it is recorded.
    """

    def ask(op: Any, *args: Any, **kwargs: Any) -> Any:
        if on_draw is not None:
            on_draw(op, args, kwargs)
        return NotImplemented

    asking = {op: functools.partial(ask, op) for op in _random_ops()}
    with torch.autograd.set_multithreading_enabled(False):
        return make_fx(function, decomposition_table=asking)(*args)


@functools.cache
def _random_ops() -> tuple[Any, ...]:
    """The operators that draw from a generator."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, op = name.partition("::")
        base, _, overload = op.partition(".")
        packet = getattr(torch.ops.aten, base, None) if space == "aten" else None
        target = getattr(packet, overload or "default", None)
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            found.append(target)
    return tuple(found)


class Lines(TorchDispatchMode):
    """Notes for every node that is traced inside which line made it.

    Args:
        found: number of a node -> line; filled.
        line: tells the line that runs now.
    """

    def __init__(self, found: dict[int, str], line: Callable[[], str]):
        super().__init__()
        self._found = found
        self._line = line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = num_nodes()
        out = func(*args, **(kwargs or {}))
        if line := self._line():
            self._found.update(dict.fromkeys(range(start, num_nodes()), line))
        return out


def declared(op: Any, args: Sequence[Any]) -> Any:
    """The operator that does the same, and says in its schema which arguments it writes into.

    Batch norm's own writes into its running statistics without saying so.
    """
    if op is torch.ops.aten.native_batch_norm.default and args[3] is not None and args[5]:
        return torch.ops.aten._native_batch_norm_legit.default
    return op


def has_derivative(op: Any) -> bool:
    """Whether autograd has a rule for an operator; without one its gradient is zero."""
    name = getattr(op, "name", str)()
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def gradients(
    loss: torch.Tensor, leaves: Sequence[torch.Tensor], scale: float = 1.0
) -> Sequence[Any]:
    """`torch.autograd.grad`, which by itself would suspend an active function mode."""
    start = torch.full_like(loss, scale)
    return _engine_run_backward(
        (loss,), (start,), False, False, tuple(leaves), True, accumulate_grad=False
    )


def num_nodes() -> int:
    """The number of nodes traced so far."""
    mode = get_proxy_mode()
    assert mode is not None
    return len(mode.tracer.graph.nodes)


def annotate(tag: str) -> contextlib.AbstractContextManager[None]:
    """Tags the nodes traced inside, with "remat.REGION" or "name.NAME"."""
    return fx_traceback.annotate({_TAG + tag: 1})


def regions_of(node: torch.fx.Node) -> tuple[str, ...]:
    """The remat regions that a node was traced in, outermost first."""
    return _tags(node, "remat.")


def names_of(node: torch.fx.Node) -> tuple[str, ...]:
    """The names that a node was traced to give."""
    return _tags(node, "name.")


def _tags(node: torch.fx.Node, kind: str) -> tuple[str, ...]:
    custom = node.meta.get("custom") or {}
    prefix = _TAG + kind
    return tuple(key.removeprefix(prefix) for key in custom if key.startswith(prefix))
