"""Refuses tensors that a kernel must not touch, before it touches any.

The common case is decided by a few passes of C speed over the whole lists; only a failure looks
for the argument to name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add, attrgetter, eq, le
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["addresses", "check_disjoint", "check_same", "check_threads"]

Named = dict[str, Sequence[Tensor]]

_PLAIN = {Tensor, torch.nn.Parameter}
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_is_cpu, _device = attrgetter("is_cpu"), attrgetter("device")


def _fail(where: str, what: str, expected: object, got: object) -> NoReturn:
    raise ValueError(f"{where}: {what}: expected {expected}, got {got}")


def check_threads(where: str, threads: int) -> None:
    """Raises a ValueError unless `threads` is a positive int."""
    if not isinstance(threads, int) or threads < 1:
        _fail(where, "threads", "an int of at least 1", repr(threads))


def addresses(where: str, name: str, tensors: object) -> list[int]:
    """Where each tensor of a list or tuple starts.

    Raises:
        ValueError: `tensors` is something else, or one of them has no memory of its own (sparse,
            fake).
    """
    if not isinstance(tensors, (list, tuple)):
        _fail(where, name, "a list of tensors", type(tensors).__name__)
    if not set(map(type, tensors)) <= _PLAIN:
        for i, x in enumerate(tensors):
            if not isinstance(x, Tensor):
                _fail(where, f"{name}[{i}]", "a tensor", type(x).__name__)
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        for i, x in enumerate(tensors):
            if x.layout is not torch.strided:
                _fail(where, f"layout of {name}[{i}]", torch.strided, x.layout)
        raise


def _name_first(
    where: str, named: Named, what: str, read: Callable[[Tensor], Any], expected: Any
) -> None:
    for name, tensors in named.items():
        for i, x in enumerate(tensors):
            if read(x) != expected:
                _fail(where, f"{what} of {name}[{i}]", expected, read(x))


def check_same(where: str, named: Named, dtypes: Sequence[torch.dtype]) -> list[int]:
    """Checks lists that run in parallel, tensor by tensor, through one kernel.

    Returns:
        Number of elements of each tensor of a list.

    Raises:
        ValueError: the lists differ in length or shapes, or the tensors in dtype or device; a
            dtype is none of `dtypes`; a tensor is not contiguous or only lazily negated.
    """
    name, first = next(iter(named.items()))
    for other, tensors in named.items():
        if len(tensors) != len(first):
            _fail(where, f"number of tensors in {other}", len(first), len(tensors))
    if not first:
        return []
    dtype = first[0].dtype
    if dtype not in dtypes:
        _fail(where, f"dtype of {name}[0]", " or ".join(map(str, dtypes)), dtype)
    every = [x for tensors in named.values() for x in tensors]
    if set(map(_dtype, every)) != {dtype}:
        _name_first(where, named, "dtype", _dtype, dtype)
    if not all(map(_is_cpu, every)):
        _name_first(where, named, "device", _device, first[0].device)
    if not all(map(Tensor.is_contiguous, every)):
        _name_first(where, named, "contiguity", Tensor.is_contiguous, True)
    if any(map(Tensor.is_neg, every)):
        _name_first(where, named, "lazy negation", Tensor.is_neg, False)
    counts = list(map(Tensor.numel, first))
    read = Tensor.numel if max(map(Tensor.dim, first)) < 2 else _shape
    for other, tensors in named.items():
        if tensors is not first and not all(map(eq, map(read, first), map(read, tensors))):
            i = next(i for i, x in enumerate(tensors) if read(x) != read(first[i]))
            _fail(where, f"shape of {other}[{i}]", tuple(first[i].shape), tuple(tensors[i].shape))
    return counts


def check_disjoint(
    where: str, named: Named, starts: Sequence[Sequence[int]], sizes_bytes: Sequence[int],
    *, only_read: str,
) -> None:  # fmt: skip
    """Checks that no tensor that is written shares memory with any other; reads may share.

    Args:
        where: function to name in the error.
        named: lists of tensors, all written except the one called `only_read`.
        starts: addresses of the tensors, list by list.
        sizes_bytes: of the tensors of any one list.
        only_read: name of the list whose tensors may share memory with each other.

    Raises:
        ValueError: names the two tensors.
    """
    sizes = [size for size in sizes_bytes if size]
    begins = [start for row in starts for start, size in zip(row, sizes_bytes, strict=True) if size]
    ends = sorted(map(add, begins, sizes * len(starts)))
    if all(map(le, ends, sorted(begins)[1:])):
        return
    spans = sorted(
        (start, start + size, f"{name}[{i}]", name != only_read)
        for name, row in zip(named, starts, strict=True)
        for i, (start, size) in enumerate(zip(row, sizes_bytes, strict=True))
        if size
    )
    reaching: dict[bool, tuple[int, str]] = {True: (0, ""), False: (0, "")}
    for start, end, name, written in spans:
        for other_written, (other_end, other) in reaching.items():
            if start < other_end and (written or other_written):
                _fail(where, "memory", f"{other} and {name} apart", "an overlap")
        reaching[written] = max(reaching[written], (end, name))
