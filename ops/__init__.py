"""Kernels on raw memory: native where they are built, plain torch everywhere else."""

from .backend import has_native

__all__ = ["has_native"]
