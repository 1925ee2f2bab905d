"""Capture: a user's function becomes a Program of compute ops, without running it.

`slots` describes what the function is called with (and is the signature that keys the cache),
`trace` turns the function into one graph on fake tensors, `graph` turns that graph into a Program.
"""

from zfunc.capture.graph import to_program
from zfunc.capture.slots import (
    ArgLeaf,
    Argument,
    Input,
    LeafSlot,
    Static,
    describe,
    difference,
    refuse_shapes,
)
from zfunc.capture.trace import Traced, lookup_full, trace_forward, trace_loss

__all__ = [
    "ArgLeaf",
    "Argument",
    "Input",
    "LeafSlot",
    "Static",
    "Traced",
    "describe",
    "difference",
    "lookup_full",
    "refuse_shapes",
    "to_program",
    "trace_forward",
    "trace_loss",
]
