"""Batches of variable-length samples under a token budget, planned before the first one is read.

Samples stream through one open round per padded length. A round is what all ranks take in one step:
as many samples as fill the budget of each, all padded to one length, so ranks run one program and
there are as many programs as padded lengths. At the end what is left of one length joins the next
if it fits in; a round that is not full keeps its shape. The plan is a pure function of its
arguments.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from zfunc import random
from zfunc.meshes import Mesh

__all__ = ["Batch", "Plan", "by_tokens", "pad", "padded_lengths"]

Order = Literal["given", "shuffle", "length"]
_ORDERS = ("given", "shuffle", "length")


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one rank's batch.

    Attributes:
        indices: which samples, at most `rows`.
        rows: the rows of the padded batch; those without a sample are all padding.
        length: the tokens of a padded row.
        tokens: the tokens that are no padding.
    """

    indices: tuple[int, ...]
    rows: int
    length: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan(Sequence[Any]):
    """The batches of one epoch; made by `by_tokens`.

    `plan[n]` is this rank's batch for step n, or with `accum` > 1 the list of them, and so is what
    iteration yields; `plan[n:]` goes on from a position.

    Attributes:
        rounds: per step what all ranks take, `rounds[n][micro][rank]`.
        rank: this rank.
        dropped: samples that are in no batch.
    """

    rounds: tuple[tuple[tuple[Batch, ...], ...], ...]
    rank: int
    dropped: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rounds)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return dataclasses.replace(self, rounds=self.rounds[position])
        own = [row[self.rank] for row in self.rounds[position]]
        return own[0] if len(own) == 1 else own

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    def samples(self) -> list[int]:
        """The number of samples of each step, over all ranks and micro-batches."""
        return [sum(len(b.indices) for b in _flat(row)) for row in self.rounds]

    def tokens(self) -> list[int]:
        """The number of tokens of each step that are no padding, over all ranks."""
        return [sum(b.tokens for b in _flat(row)) for row in self.rounds]

    def shapes(self) -> set[tuple[int, int]]:
        """The rows and the length of every padded batch: one capture of the loss for each."""
        return {(b.rows, b.length) for row in self.rounds for b in _flat(row)}

    def padding(self) -> float:
        """The part of all padded batches that is padding."""
        computed = sum(b.rows * b.length for row in self.rounds for b in _flat(row))
        return 1 - sum(self.tokens()) / computed if computed else 0.0

    def indices(self) -> list[int]:
        """The samples of all steps, in the order in which they are taken.

        `by_tokens(..., only=plan[n:].indices())` plans what is left after n steps again, for as
        many ranks as there are then.
        """
        return [i for row in self.rounds for b in _flat(row) for i in b.indices]


def by_tokens(
    lengths: Sequence[int] | np.ndarray | Tensor,
    max_tokens: int | Callable[[int], float],
    *,
    mesh: Mesh,
    key: Tensor | None = None,
    order: Order | None = None,
    buckets: int | Sequence[int] = 8,
    multiple_of: int = 1,
    min_size: int = 0,
    max_size: int | None = None,
    accum: int = 1,
    drop_last: bool = False,
    only: Sequence[int] | None = None,
) -> Plan:
    """Plans batches of about equally many tokens from samples of different lengths.

    A batch holds `rows = max_tokens // length` samples of one padded length, so its padded size is
    within the budget. All ranks get equally many batches, and batches of one shape in the same
    step. Every rank gives the same arguments but for the mesh's rank.

    A loss that returns `(sum, weight)` with the sum over real tokens and their number as the weight
    averages exactly over ranks and micro-batches with different numbers of tokens; a rank whose
    part of a round is empty has weight 0.

    Args:
        lengths: the tokens of each sample.
        max_tokens: the most padded tokens of one batch of one rank; or its course over the steps
            of the plan, any `schedules` curve: a sample waits until the budget holds it
            (curriculum by length: Li et al. 2022, "The Stability-Efficiency Dilemma").
        mesh: whose ranks the batches are for.
        key: decides the order "shuffle".
        order: in which samples come: "given", "shuffle", or "length" (short ones first); by default
            "shuffle" with a key and "given" without.
        buckets: the padded lengths; a number means so many, those that pad least
            (`padded_lengths`).
        multiple_of: padded lengths that are chosen are rounded up to a multiple of this.
        min_size: the fewest samples of a batch; a round at the end that has fewer for some
            rank is dropped. With 0 it is kept, and the part of a rank may be empty.
        max_size: the most samples of a batch.
        accum: the number of micro-batches of a step.
        drop_last: whether to drop the rounds at the end that are not full.
        only: the samples to plan, in their given order; all by default.

    Returns:
        The plan of one epoch.

    Raises:
        ValueError: a length that is not positive; a budget that does not hold `min_size` samples of
            every padded length (samples for which a schedule's budget stays too small are dropped,
            unless that is all); a sample longer than the given buckets; "shuffle" without a key; an
            argument out of its range.

    Example:
        >>> import zfunc
        >>> plan = by_tokens([3, 9, 4, 8, 2, 9, 4, 1], 20, mesh=zfunc.abstract_mesh({"shard": 2}),
        ...                  buckets=2)
        >>> [(batch.indices, batch.rows, batch.length) for batch in plan]
        [((0, 2, 4), 5, 4), ((1, 3), 2, 9)]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    chosen = np.arange(len(sizes)) if only is None else np.asarray(only, dtype=np.int64)
    _check_least(1, accum=accum, multiple_of=multiple_of)
    _check_least(0, min_size=min_size)
    if max_size is not None:
        _check_least(max(min_size, 1), max_size=max_size)
    own = sizes[chosen]
    order_of = _places(own, key, order)
    if not len(own):
        return Plan((), mesh.rank, ())
    if own.min() < 1:
        raise ValueError(f"sample {chosen[own.argmin()]} has {own.min()} tokens: leave it out")
    if isinstance(buckets, int):
        lasts = padded_lengths(own, buckets, multiple_of=multiple_of)
    else:
        lasts = sorted(set(buckets))
    if own.max() > max(lasts, default=0):
        raise ValueError(
            f"sample {chosen[own.argmax()]} has {own.max()} tokens, the longest bucket "
            f"{max(lasts, default=0)}: give a longer one, or leave such samples out by `only`"
        )
    packer = _Packer(sizes, lasts, max_tokens, mesh.size, accum, min_size, max_size)
    for index in chosen[order_of].tolist():
        packer.add(index)
    packer.finish(drop_last)
    return Plan(tuple(packer.rounds), mesh.rank, tuple(packer.dropped))


def _places(sizes: np.ndarray, key: Tensor | None, order: Order | None) -> np.ndarray:
    """The order in which samples come."""
    order = order or ("given" if key is None else "shuffle")
    if order not in _ORDERS:
        raise ValueError(f"order={order!r} must be one of {', '.join(map(repr, _ORDERS))}")
    if order == "length":
        return np.argsort(sizes, kind="stable")
    if order == "given":
        return np.arange(len(sizes))
    if key is None:
        raise ValueError("order='shuffle' needs a key: give key=zfunc.random.key(seed)")
    return random.permutation(key, len(sizes)).numpy()


class _Packer:
    """The open round of each padded length, and what was closed so far."""

    def __init__(
        self,
        sizes: np.ndarray,
        lasts: Sequence[int],
        max_tokens: int | Callable[[int], float],
        world: int,
        accum: int,
        min_size: int,
        max_size: int | None,
    ):
        self.rounds: list[tuple[tuple[Batch, ...], ...]] = []
        self.dropped: list[int] = []
        self._sizes, self._lasts, self._budget = sizes, lasts, max_tokens
        self._world, self._accum = world, accum
        self._least, self._most = min_size, max_size
        self._open: list[list[int]] = [[] for _ in lasts]
        if not callable(max_tokens) and not self._rows(len(lasts) - 1):
            self._refuse(lasts[-1])

    def add(self, index: int) -> None:
        """Puts a sample into its round, and closes what is full then."""
        place = self._place(self._sizes[index])
        self._open[place].append(index)
        self._close(place)

    def finish(self, drop_last: bool) -> None:
        """Deals out what is left, together with that of the next padded length if it fits in."""
        for place, left in enumerate(self._open):
            longer = place + 1
            room = self._full(longer) - len(self._open[longer]) if self._open[longer:] else 0
            if 0 < len(left) <= room:
                self._open[longer] = left + self._open[longer]
                self._close(longer)
            elif left and self._rows(place) and not drop_last:
                self._deal_last(left, place)
            else:
                self.dropped += left
        if self.dropped and not self.rounds and callable(self._budget):
            self._refuse(int(self._sizes[self.dropped].min()))

    def _place(self, size: int) -> int:
        """Which padded length holds a sample."""
        return bisect.bisect_left(self._lasts, size)

    def _rows(self, place: int) -> int:
        """The samples of a batch of a padded length in the next step; 0 if too few fit."""
        rows = self._tokens() // self._lasts[place]
        rows = rows if self._most is None else min(rows, self._most)
        return rows if rows >= self._least else 0

    def _tokens(self) -> int:
        """The budget of the next step."""
        budget = self._budget
        return int(budget(len(self.rounds))) if callable(budget) else budget

    def _close(self, place: int) -> None:
        """Closes a round if it is full; then the next step's budget may make others so."""
        if self._take(place):
            while any(self._take(other) for other in range(len(self._lasts))):
                pass

    def _full(self, place: int) -> int:
        """The samples of a round of a padded length, if the next step takes it."""
        return self._rows(place) * self._world * self._accum

    def _take(self, place: int) -> bool:
        """Deals a full round out to ranks and micro-batches, if there is one."""
        waiting, full = self._open[place], self._full(place)
        if not full or len(waiting) < full:
            return False
        self._open[place] = waiting[full:]
        rows = self._rows(place)
        self._deal([waiting[start : start + rows] for start in range(0, full, rows)], place)
        return True

    def _deal_last(self, left: list[int], place: int) -> None:
        """Deals a round that is not full out evenly."""
        parts = [part.tolist() for part in np.array_split(left, self._world * self._accum)]
        if len(parts[-1]) < self._least:
            self.dropped += left
        else:
            self._deal(parts, place)

    def _deal(self, parts: list[list[int]], place: int) -> None:
        rows, length = self._rows(place), self._lasts[place]
        batches = [
            Batch(tuple(part), rows, length, int(self._sizes[part].sum()) if part else 0)
            for part in parts
        ]
        starts = range(0, len(batches), self._world)
        self.rounds.append(tuple(tuple(batches[i : i + self._world]) for i in starts))

    def _refuse(self, length: int) -> None:
        least = max(self._least, 1)
        raise ValueError(
            f"a budget of {self._tokens()} tokens does not hold {least} samples of {length}: give "
            f"max_tokens of {least * length} or more"
        )


def padded_lengths(
    lengths: Sequence[int] | np.ndarray, count: int, *, multiple_of: int = 1
) -> list[int]:
    """Chooses the padded lengths that pad least in total, by dynamic programming.

    Args:
        lengths: the tokens of each sample.
        count: how many to choose at most.
        multiple_of: what each is a multiple of.

    Returns:
        Ascending lengths, the last one at least the longest of `lengths`; fewer than `count` where
        fewer do as well.

    Raises:
        ValueError: a `count` or `multiple_of` below 1.

    Example:
        >>> padded_lengths([2, 2, 2, 3, 9, 10], 2)
        [3, 10]
    """
    _check_least(1, count=count, multiple_of=multiple_of)
    rounded = -(-np.asarray(lengths, dtype=np.int64) // multiple_of) * multiple_of
    values, counts = np.unique(rounded, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    # best[j]: the padded tokens of the j shortest values, cut[j]: where their last group begins.
    best = np.concatenate([[0.0], np.full(len(values), np.inf)])
    cuts = []
    for _ in range(min(count, len(values))):
        rows = [
            best[: j + 1] + value * (below[j + 1] - below[: j + 1])
            for j, value in enumerate(values)
        ]
        cut = [int(row.argmin()) for row in rows]
        best = np.array([0.0, *(row[i] for row, i in zip(rows, cut, strict=True))])
        cuts.append(cut)
    chosen, stop = [], len(values)
    for cut in reversed(cuts):
        if stop:
            chosen.append(int(values[stop - 1]))
            stop = cut[stop - 1]
    return chosen[::-1]


def pad(
    batch: Batch, samples: Sequence[Tensor], fill: float = 0, *, like: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Stacks the samples of a batch in padded rows.

    Args:
        batch: of a plan.
        samples: [tokens, ...] for each of `batch.indices`, of one dtype.
        fill: the value of padding.
        like: any sample: the dtype and dims of a batch without samples.

    Returns:
        The rows [rows, length, ...], and where they are no padding, bool [rows, length].

    Raises:
        ValueError: a wrong number of samples, one that is longer than a row, none at all and no
            `like`.

    Example:
        >>> rows, real = pad(Batch((7, 2), 3, 4, 3), [torch.tensor([5, 6]), torch.tensor([8])])
        >>> rows.tolist(), real.sum(1).tolist()
        ([[5, 6, 0, 0], [8, 0, 0, 0], [0, 0, 0, 0]], [2, 1, 0])
    """
    if len(samples) != len(batch.indices):
        raise ValueError(f"the batch has {len(batch.indices)} samples, got {len(samples)}")
    model = samples[0] if len(samples) else like
    if model is None:
        raise ValueError("a batch without samples needs like=, any sample of the data")
    rows = model.new_full((batch.rows, batch.length, *model.shape[1:]), fill)
    real = torch.zeros(batch.rows, batch.length, dtype=torch.bool, device=model.device)
    for row, sample in enumerate(samples):
        if len(sample) > batch.length:
            raise ValueError(f"a sample of {len(sample)} tokens in a row of {batch.length}")
        rows[row, : len(sample)] = sample
        real[row, : len(sample)] = True
    return rows, real


def _check_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}={value} must be {least} or more")


def _flat(row: Sequence[Sequence[Batch]]) -> Iterator[Batch]:
    return (batch for micro in row for batch in micro)
