"""Random numbers as pure functions of a key: the same numbers on any mesh, cut in any way.

A key is an int64 tensor [2] that holds two 32-bit words. Element i of a draw is a function of the
key and of i alone, never of the draw's shape or of a hidden state, and `start=` draws any part of a
longer draw. So a rank can draw its own shard, and nothing depends on how many ranks there are.

The function is the block cipher Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror and Shaw 2011,
"Parallel Random Numbers: As Easy as 1, 2, 3", where it is the one called Threefry; constants and
known answers from its reference implementation, Random123). One key enciphers three separate ranges
of counters, told apart by the top two bits of the second counter word: draws (00), `split` (01) and
`fold_in` (10). A cipher is a bijection, so the keys that `split` and `fold_in` derive from one key
are all different, and none is ever a block of a draw. All is made of plain torch ops on int64,
so it traces and maps.

A key is for one use: two draws with the same key are made of the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "bernoulli",
    "fold_in",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "threefry_2x32",
    "uniform",
]

_WORD = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_SPLIT, _FOLD, _TAGGED = 1 << 30, 2 << 30, (1 << 30) - 1
_MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """Makes a key from a seed.

    Args:
        seed: any int; its lower 64 bits count.
        device: where the key, and what is drawn with it, lives.

    Returns:
        An int64 tensor [2] of 32-bit words.

    Example:
        >>> key(7)
        tensor([0, 7])
    """
    words = [seed >> 32 & _WORD, seed & _WORD]
    return torch.tensor(words, dtype=torch.int64, device=device)


def split(key: Tensor, n: int = 2) -> Tensor:
    """Derives n keys from one. They all differ, and differ from what `fold_in` derives.

    Args:
        key: a key, which is then used up.
        n: how many, at most 2**32.

    Returns:
        An int64 tensor [n, 2]; it unpacks into n keys.

    Example:
        >>> init_key, train_key = split(key(0))
    """
    index = torch.arange(n, dtype=torch.int64, device=key.device)
    return torch.stack(threefry_2x32(key, index, torch.full_like(index, _SPLIT)), dim=-1)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Derives a key from a key and a number, such as a step or the index of a rank.

    Args:
        key: a key. It may be folded with many numbers: each gives another key.
        data: an int or an integer tensor without dims, from 0 up to 2**62 - 1.

    Returns:
        A key.

    Raises:
        ValueError: an int out of range.

    Example:
        >>> step_key = fold_in(key(0), 100)
    """
    if not isinstance(data, Tensor):
        if not 0 <= data < 1 << 62:
            raise ValueError(f"fold_in data is {data}: it must lie from 0 up to 2**62 - 1")
        data = torch.full((), data, dtype=torch.int64, device=key.device)
    number = data.to(torch.int64)
    return torch.stack(threefry_2x32(key, number & _WORD, (number >> 32 & _TAGGED) + _FOLD))


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    *,
    minval: float = 0.0,
    maxval: float = 1.0,
    start: int = 0,
) -> Tensor:
    """Draws evenly from [minval, maxval).

    With the default bounds every multiple of 2**-p in [0, 1) is equally likely, where p is the
    number of bits in the dtype's significand. Other bounds may round up to `maxval`.

    Args:
        key: a key.
        shape: the shape of the result.
        dtype: a floating dtype.
        minval: the lower bound.
        maxval: the upper bound.
        start: the place of the first element in a longer draw.

    Returns:
        A tensor of that shape and dtype.

    Example:
        >>> bool((uniform(key(0), (4,))[2:] == uniform(key(0), (2,), start=2)).all())
        True
    """
    bits = _mantissa_bits(dtype)
    unit = (_bits(key, math.prod(shape), start, bits).to(dtype) * 2.0**-bits).reshape(tuple(shape))
    return unit if (minval, maxval) == (0.0, 1.0) else minval + unit * (maxval - minval)


def normal(
    key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32, *, start: int = 0
) -> Tensor:
    """Draws from the normal distribution with mean 0 and variance 1.

        x = sqrt(2) * erfinv(2 * u - 1),    u at the middle of one of 2**p equal steps of (0, 1)

    float16 and bfloat16 are drawn in float32 and rounded. Values beyond 5.5 (float32) or 8.3
    (float64) never occur.

    Args:
        key: a key.
        shape: the shape of the result.
        dtype: a floating dtype.
        start: the place of the first element in a longer draw.

    Returns:
        A tensor of that shape and dtype.

    Example:
        >>> normal(key(0), (2, 3)).shape
        torch.Size([2, 3])
    """
    _mantissa_bits(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bits = _MANTISSA_BITS[wide]
    # An odd numerator over 2**bits keeps clear of -1 and 1, and is exact in `wide`.
    odd = 2 * _bits(key, math.prod(shape), start, bits) - ((1 << bits) - 1)
    ends = (odd.to(wide) * 2.0**-bits).reshape(tuple(shape))
    return (math.sqrt(2) * torch.erfinv(ends)).to(dtype)


def bernoulli(
    key: Tensor, p: float | Tensor = 0.5, shape: Sequence[int] | None = None, *, start: int = 0
) -> Tensor:
    """Draws True with probability p.

    Args:
        key: a key.
        p: the probability, or one for each element.
        shape: the shape of the result; that of `p` when not given.
        start: the place of the first element in a longer draw.

    Returns:
        A bool tensor.

    Example:
        >>> bernoulli(key(0), 0.9, (3,)).dtype
        torch.bool
    """
    if shape is None:
        shape = p.shape if isinstance(p, Tensor) else ()
    return uniform(key, shape, start=start) < p


def randint(
    key: Tensor, shape: Sequence[int], minval: int, maxval: int, *, start: int = 0
) -> Tensor:
    """Draws integers from [minval, maxval).

    The remainder of a 62-bit number: an integer's probability is off by a factor of at most
    1 + (maxval - minval) / 2**62.

    Args:
        key: a key.
        shape: the shape of the result.
        minval: the smallest integer.
        maxval: one more than the largest.
        start: the place of the first element in a longer draw.

    Returns:
        An int64 tensor of that shape.

    Raises:
        ValueError: an empty range, or one of more than 2**62 integers.

    Example:
        >>> bool((randint(key(0), (100,), -3, 4).abs() <= 3).all())
        True
    """
    span = maxval - minval
    if not 0 < span <= 1 << 62:
        raise ValueError(f"randint draws from [{minval}, {maxval}): give 1 to 2**62 integers")
    return (minval + _bits(key, math.prod(shape), start, 62) % span).reshape(tuple(shape))


def permutation(key: Tensor, n: int) -> Tensor:
    """Draws an order of 0, 1, ..., n - 1: the stable order of n 62-bit numbers.

    Args:
        key: a key.
        n: how many.

    Returns:
        An int64 tensor [n].

    Example:
        >>> permutation(key(0), 5).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    return torch.argsort(_bits(key, n, 0, 62), stable=True)


def threefry_2x32(key: Tensor, counter_0: Tensor, counter_1: Tensor) -> tuple[Tensor, Tensor]:
    """Enciphers blocks of two 32-bit words (Threefry-2x32, 20 rounds).

    Args:
        key: an int64 tensor [2] of 32-bit words.
        counter_0: the first words, int64 of any shape, in [0, 2**32).
        counter_1: the second words, of the same shape.

    Returns:
        The two enciphered words of each block.

    Example:
        >>> zero = torch.tensor(0)
        >>> [hex(int(word)) for word in threefry_2x32(torch.tensor([0, 0]), zero, zero)]
        ['0x6b200159', '0x99ba4efe']
    """
    words = key[0], key[1], key[0] ^ key[1] ^ _PARITY
    x, y = counter_0 + words[0], (counter_1 + words[1]) & _WORD
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            # x may run over 32 bits (it stays below 2**38): only its lower ones ever reach y.
            x = x + y
            shifted = y << distance
            y = ((shifted | shifted >> 32) ^ x) & _WORD
        x = x + words[(group + 1) % 3]
        y = (y + (words[(group + 2) % 3] + group + 1)) & _WORD
    return x & _WORD, y


def _bits(key: Tensor, numel: int, start: int, bits: int) -> Tensor:
    """Draws int64 numbers of so many random bits: half a block each up to 32 bits, else a block."""
    if bits > 32:
        high, low = _blocks(key, start, start + numel)
        return high >> (64 - bits) << 32 | low
    first, last = start // 2, (start + numel + 1) // 2
    words = torch.stack(_blocks(key, first, last), dim=-1).reshape(-1)
    return words[start - 2 * first :][:numel] >> (32 - bits)


def _blocks(key: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Enciphers the block numbers from `first` up to `last`."""
    index = torch.arange(first, last, dtype=torch.int64, device=key.device)
    return threefry_2x32(key, index & _WORD, index >> 32)


def _mantissa_bits(dtype: torch.dtype) -> int:
    if dtype not in _MANTISSA_BITS:
        raise ValueError(f"{dtype} cannot be drawn: give one of {list(_MANTISSA_BITS)}")
    return _MANTISSA_BITS[dtype]
