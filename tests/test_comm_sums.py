"""Sums over ranks: in rank order, in the dtype of the sum, whatever travels beside them."""

import functools
import operator

import pytest
import torch

from tests.adversary import adversary
from tests.test_comm import LARGE, both, cut, on_gloo, on_local, same


def normal(rank, numel, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).mul(10.0**rank).to(dtype)


def sum_normals(mesh, numels, dtype):
    size, index = mesh.size, mesh.rank
    fulls = [normal(mesh.rank, numel, dtype) for numel in numels]
    shards = [torch.empty_like(cut(full, size, index)) for full in fulls]
    outs = [torch.empty_like(full) for full in fulls]
    first = mesh.comm.reduce("shard", fulls, shards)
    mesh.comm.all_reduce("shard", fulls, outs).wait()
    first.wait()
    return shards, outs


@both
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_added_in_rank_order(run, world, dtype):
    numels = [37, 4 * world * LARGE + 5]
    results = run({"shard": world}, sum_normals, numels, dtype)
    for place, numel in enumerate(numels):
        terms = [normal(rank, numel, dtype) for rank in range(world)]
        chain = functools.reduce(operator.add, terms)
        backwards = functools.reduce(operator.add, terms[::-1])
        assert world == 2 or not same(chain, backwards)  # the order can be seen at all
        for rank, (shards, outs) in enumerate(results):
            assert same(shards[place], cut(chain, world, rank))
            assert same(outs[place], chain)


WIDER = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float64),
    (torch.int32, torch.int64),
]


def sum_widened(mesh, seed):
    """Two sizes in every pair of dtypes, and a large one in two of them, in one call."""
    before = mesh.comm.stats()
    comm = (adversary(mesh, seed) if seed is not None else mesh).comm
    size, index = mesh.size, mesh.rank
    pairs = [(3, *pair) for pair in WIDER] + [(38, *pair) for pair in reversed(WIDER)]
    pairs += [(2 * size * LARGE + 5, *pair) for pair in WIDER[:2]]
    fulls = [normal(mesh.rank, numel, narrow) for numel, narrow, _ in pairs]
    rows = list(zip(fulls, pairs, strict=True))
    shards = [torch.empty_like(cut(full, size, index), dtype=wide) for full, (*_, wide) in rows]
    outs = [torch.empty_like(full, dtype=wide) for full, (*_, wide) in rows]
    first = comm.reduce("shard", fulls, shards)
    comm.all_reduce("shard", fulls, outs).wait()
    first.wait()
    after = mesh.comm.stats()
    sent = after.messages - before.messages, after.payload_bytes - before.payload_bytes
    return pairs, shards, outs, sent


@both
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_in_wider_dtypes_do_not_depend_on_their_neighbours(run, world, seed):
    results = run({"shard": world}, sum_widened, seed)
    for rank, (pairs, shards, outs, _) in enumerate(results):
        for (numel, narrow, wide), shard, out in zip(pairs, shards, outs, strict=True):
            terms = [normal(other, numel, narrow).to(wide) for other in range(world)]
            chain = functools.reduce(operator.add, terms)
            assert same(shard, cut(chain, world, rank)), (numel, narrow, wide)
            assert same(out, chain), (numel, narrow, wide)
    if run is on_gloo:
        virtual = on_local({"shard": world}, sum_widened, seed)
        assert [row[-1] for row in virtual] == [row[-1] for row in results]
