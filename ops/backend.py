"""Finds the compiled kernels and says whether they run, and on which instruction set.

The extension is loaded once, when this module is imported; the environment is read at each call.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch

__all__ = ["CODES", "has_native", "isa", "isas", "native"]

ABI = 1
"""Version of the calls between Python and C++; `native/module.cpp` holds the same number."""

CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Dtypes that a kernel reads, by their number in `native/kernels.hpp`."""

_REBUILD = "rebuild it with `pip install --no-build-isolation -e .`, or set ZFUNC_NATIVE=0"


def _check_abi(found: int) -> None:
    if found != ABI:
        raise ImportError(
            f"zfunc.ops._native is of another build: expected ABI {ABI}, got {found}; {_REBUILD}"
        )


def _load() -> ModuleType | None:
    if os.environ.get("ZFUNC_NATIVE") == "0":
        return None
    try:
        from . import _native
    except ImportError as error:
        if os.environ.get("ZFUNC_REQUIRE_NATIVE") == "1":
            raise ImportError(
                f"zfunc.ops._native cannot be imported ({error}), and ZFUNC_REQUIRE_NATIVE=1 "
                f"asks for it; {_REBUILD}"
            ) from error
        return None
    _check_abi(_native.ABI)
    return _native


_NATIVE = _load()
_ISAS: tuple[str, ...] = () if _NATIVE is None else tuple(_NATIVE.isas())


def native() -> ModuleType | None:
    """The compiled module, or None where the reference must run."""
    return None if os.environ.get("ZFUNC_NATIVE") == "0" else _NATIVE


def has_native() -> bool:
    """Whether the compiled kernels are present and not switched off by `ZFUNC_NATIVE=0`.

    Example:
        >>> import zfunc.ops
        >>> isinstance(zfunc.ops.has_native(), bool)
        True
    """
    return native() is not None


def isas() -> tuple[str, ...]:
    """Instruction sets of the compiled kernels that this processor runs, slowest first.

    Empty without compiled kernels. All of them give the same bits.
    """
    return () if native() is None else _ISAS


def isa() -> str:
    """The instruction set in use: that of `ZFUNC_ISA`, else the fastest.

    Raises:
        ValueError: `ZFUNC_ISA` names one that this build or this processor does not have.
    """
    chosen = os.environ.get("ZFUNC_ISA", _ISAS[-1] if _ISAS else "")
    if chosen not in _ISAS:
        raise ValueError(f"ZFUNC_ISA: expected one of {', '.join(_ISAS)}, got {chosen!r}")
    return chosen
