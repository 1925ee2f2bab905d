"""Finds the compiled kernels and says which of them run: `ZFUNC_NATIVE`, `ZFUNC_ISA`."""

from __future__ import annotations

import os

__all__ = ["has_native"]

ABI = 1

try:
    from . import _native
except ImportError:
    _native = None


def has_native() -> bool:
    """Whether the compiled kernels are present and not switched off by `ZFUNC_NATIVE=0`."""
    return _native is not None and os.environ.get("ZFUNC_NATIVE") != "0"
