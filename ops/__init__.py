"""Kernels on the memory of tensors: native where they are built, plain torch everywhere else.

Each function checks its arguments, then runs the compiled kernel of `native/` for CPU tensors or
the definition in `reference.py`, which gives the same bits. `ZFUNC_NATIVE=0` switches the compiled
kernels off, `ZFUNC_ISA=scalar|avx2|avx512` picks one instruction set, `ZFUNC_REQUIRE_NATIVE=1`
makes a missing extension an error on import.
"""

from .adamw import adamw_
from .backend import has_native, isas
from .sums import all_finite, nonfinite, sum_squares

__all__ = ["adamw_", "all_finite", "has_native", "isas", "nonfinite", "sum_squares"]
