"""The names of torch that are not public or have moved between releases, in one place.

Checked against torch 2.13; everything here exists in 2.11 to 2.14 by its documentation or source.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

__all__ = [
    "PrefixStore",
    "Store",
    "copy_all",
    "default_store",
    "gloo_backend",
    "holds_store",
    "rendezvous",
]


def gloo_backend(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Connects a gloo backend that is registered nowhere: only its own ranks take part.

    Args:
        store: where its ranks meet, used by this backend alone.
        rank: this rank within it.
        size: the number of its ranks.
        timeout_s: the bound of every wait, connecting included.

    Returns:
        An object with `send(tensors, rank, tag)` and `recv(tensors, rank, tag)`.
    """
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


def default_store() -> Store:
    """The store of the process group that is running."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def holds_store(store: Store) -> bool:
    """Whether a TCP store's server lives in this process: only its text tells."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return type(store).__name__ == "TCPStore" and "server=TCPServer" in repr(store)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, by one call."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]
