"""The names of torch that capture leans on and that are not, or not yet, public.

Tested against torch 2.13; everything that may move between releases is in this file. The
refusals below are what functorch says of functions that `torch.autograd.grad` can
differentiate: they choose the other derivation, anything else is the user's own error.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    is_fake,
)
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

__all__ = [
    "DATA_DEPENDENT",
    "annotate",
    "fake_mode",
    "is_fake",
    "is_fake_refusal",
    "is_functorch_refusal",
    "num_nodes",
    "regions_of",
    "to_graph",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

_REFUSALS = (
    "don't yet support saved tensor hooks",
    "must override the setup_context staticmethod",
    "would mutate a captured Tensor",
)
_REGION = "zfunc.remat."


def is_functorch_refusal(error: BaseException) -> bool:
    """Whether functorch refused a function that plain autograd may still differentiate."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _REFUSALS)


def is_fake_refusal(error: BaseException) -> bool:
    """Whether a real tensor met the fake ones: the function captured it from outside."""
    return isinstance(error, AssertionError) and "convert all Tensors to FakeTensors" in str(error)


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


def to_graph(function: Any, *args: Any) -> torch.fx.GraphModule:
    """Traces a function of flat tuples of fake tensors."""
    with torch.autograd.set_multithreading_enabled(False):
        return make_fx(function)(*args)


def num_nodes() -> int:
    """The number of nodes traced so far."""
    mode = get_proxy_mode()
    assert mode is not None
    return len(mode.tracer.graph.nodes)


def annotate(region: str) -> contextlib.AbstractContextManager[None]:
    """Tags the nodes traced inside with a remat region."""
    return fx_traceback.annotate({_REGION + region: 1})


def regions_of(node: torch.fx.Node) -> tuple[str, ...]:
    """The remat regions that a node was traced in, outermost first."""
    custom = node.meta.get("custom") or {}
    return tuple(key.removeprefix(_REGION) for key in custom if key.startswith(_REGION))
