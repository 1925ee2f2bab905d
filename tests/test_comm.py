"""Every collective against plain algebra on the stacked data of all ranks, in one process.

The same rank functions run on virtual ranks and on gloo processes. Data are small integers, so
sums are exact and equality is bitwise; where the order of a sum matters, normal numbers are used.
"""

from __future__ import annotations

import functools
import itertools
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.adversary import adversary
from tests.ranks import run_ranks
from zfunc.comm import local_mesh
from zfunc.errors import LayoutError
from zfunc.meshes import shard_range

MESHES = [{"shard": 1}, {"shard": 2}, {"shard": 3}, {"shard": 4}, {"replica": 2, "shard": 2}]
DIRECT_BYTES = 256 * 1024  # a piece of so many bytes travels alone
LARGE = DIRECT_BYTES // 4  # its elements in fp32
SUMMED = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
MOVED = [*SUMMED, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16]


def on_local(axes, fn, *args):
    return local_mesh(axes).run(fn, *args)


def on_gloo(axes, fn, *args):
    world = functools.reduce(operator.mul, axes.values())
    return run_ranks(world, fn, *args, axes=axes)


both = pytest.mark.parametrize("run", [on_local, on_gloo])
all_meshes = pytest.mark.parametrize("axes", MESHES, ids=str)


def data(rank, numel, dtype, seed=0):
    """Integers that differ by rank; the same in the ranks and in the oracle."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(-3, 4, (numel,), generator=generator)
    return (values > 0) if dtype == torch.bool else values.to(dtype)


def cut(full, size, index):
    """This rank's piece, by list slicing."""
    chunk = (full.numel() + size - 1) // size
    return full[index * chunk : (index + 1) * chunk].clone()


def same(left, right):
    """Bitwise equality."""
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def axis_ranks(axes, rank, axis):
    """The ranks that differ from `rank` in one coordinate, by enumeration of all coordinates."""
    grid = torch.arange(functools.reduce(operator.mul, axes.values())).view(*axes.values())
    dim = list(axes).index(axis)
    return next(
        row.tolist() for row in grid.movedim(dim, -1).reshape(-1, axes[axis]) if rank in row
    )


def gather_all(mesh, axis, sizes, dtype, seed=None):
    if mesh.comm is None:
        return [data(0, numel, dtype) for numel in sizes]
    comm = (adversary(mesh, seed) if seed is not None else mesh).comm
    size, index = mesh.axis_size(axis), mesh.index(axis)
    fulls = [torch.zeros(numel).to(dtype) for numel in sizes]
    shards = [cut(data(mesh.rank, numel, dtype), size, index) for numel in sizes]
    comm.gather(axis, shards, fulls).wait()
    return fulls


def gather_bytes(mesh, axis, sizes, dtype, seed=None):
    """As bytes: not every dtype can be pickled."""
    return [full.view(torch.uint8) for full in gather_all(mesh, axis, sizes, dtype, seed)]


def reduce_all(mesh, axis, sizes, dtype, seed=None):
    if mesh.comm is None:
        return [data(0, numel, dtype) for numel in sizes]
    comm = (adversary(mesh, seed) if seed is not None else mesh).comm
    size, index = mesh.axis_size(axis), mesh.index(axis)
    fulls = [data(mesh.rank, numel, dtype) for numel in sizes]
    shards = [torch.zeros(cut(full, size, index).numel()).to(dtype) for full in fulls]
    comm.reduce(axis, fulls, shards).wait()
    return shards


def all_reduce_all(mesh, axis, sizes, dtype, seed=None):
    if mesh.comm is None:
        return [data(0, numel, dtype) for numel in sizes]
    comm = (adversary(mesh, seed) if seed is not None else mesh).comm
    tensors = [data(mesh.rank, numel, dtype) for numel in sizes]
    outs = [torch.zeros(numel).to(dtype) for numel in sizes]
    comm.all_reduce(axis, tensors, outs).wait()
    return outs


def expected_gather(axes, rank, axis, numel, dtype):
    ranks = axis_ranks(axes, rank, axis)
    pieces = [cut(data(other, numel, dtype), len(ranks), i) for i, other in enumerate(ranks)]
    return torch.cat(pieces)


def expected_bytes(axes, rank, axis, numel, dtype):
    return expected_gather(axes, rank, axis, numel, dtype).view(torch.uint8)


def expected_sum(axes, rank, axis, numel, dtype):
    terms = [data(other, numel, dtype) for other in axis_ranks(axes, rank, axis)]
    return functools.reduce(operator.add, terms)


def expected_reduce(axes, rank, axis, numel, dtype):
    ranks = axis_ranks(axes, rank, axis)
    return cut(expected_sum(axes, rank, axis, numel, dtype), len(ranks), ranks.index(rank))


CASES = [
    (gather_all, expected_gather),
    (reduce_all, expected_reduce),
    (all_reduce_all, expected_sum),
]


def check(run, axes, sizes, dtype, *, seed=None, cases=CASES):
    for axis in axes:
        for fn, oracle in cases:
            results = run(axes, fn, axis, sizes, dtype, seed)
            for rank, tensors in enumerate(results):
                for numel, result in zip(sizes, tensors, strict=True):
                    wanted = oracle(axes, rank, axis, numel, dtype)
                    assert same(result, wanted), (fn.__name__, axis, rank, numel)


@both
@all_meshes
def test_collectives_equal_stacked_algebra(run, axes):
    check(run, axes, [1, 0, 2, 5, 12, 4 * LARGE + 3, 1, LARGE, 2 * LARGE - 1], torch.float32)


@both
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_every_dtype_that_can_be_added(run, dtype):
    check(run, {"shard": 3}, [1, 7, 3 * DIRECT_BYTES // dtype.itemsize + 1], dtype)


@both
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_every_dtype_is_gathered(run, dtype):
    cases = [(gather_bytes, expected_bytes)]
    check(run, {"shard": 3}, [1, 7, 3 * DIRECT_BYTES // dtype.itemsize + 1], dtype, cases=cases)


@given(
    axes=st.sampled_from(MESHES),
    sizes=st.lists(st.integers(0, 20), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.int64, torch.bfloat16]),
    seed=st.none() | st.integers(0, 5),
)
def test_collectives_of_any_sizes(axes, sizes, dtype, seed):
    check(on_local, axes, sizes, dtype, seed=seed)


@given(
    axes=st.sampled_from(MESHES[1:]),
    sizes=st.lists(st.integers(0, 20), max_size=6),
    seed=st.none() | st.integers(0, 5),
)
def test_collectives_of_any_sizes_on_processes(axes, sizes, seed):
    check(on_gloo, axes, sizes, torch.float32, seed=seed)


def mixed_dtypes(mesh):
    fulls = [torch.zeros(5), torch.zeros(3, dtype=torch.int64), torch.zeros(4), torch.zeros(0)]
    shards = [
        torch.full((stop - start,), mesh.rank, dtype=full.dtype)
        for full in fulls
        for start, stop in [shard_range(full.numel(), 2, mesh.rank)]
    ]
    before = mesh.comm.stats().messages
    mesh.comm.gather("shard", shards, fulls).wait()
    return [full.tolist() for full in fulls], mesh.comm.stats().messages - before


@both
def test_tensors_of_several_dtypes_travel_by_dtype(run):
    for fulls, messages in run({"shard": 2}, mixed_dtypes):
        assert fulls == [[0, 0, 0, 1, 1], [0, 0, 1], [0, 0, 1, 1], []]
        assert messages == 2


def many_in_flight(mesh, order_seed, count):
    """Issues collectives of all kinds and sizes, and awaits them in an order of this rank's own."""
    size, index = mesh.size, mesh.rank
    handles, got, wanted = [], [], []
    numels = [5, 3 * LARGE, 1, 0, 4 * LARGE + 1]
    for number in range(count):
        numel = numels[number % len(numels)]
        terms = [data(rank, numel, torch.float32, number) for rank in range(size)]
        full = terms[mesh.rank]
        kind = number % 3
        if kind == 0:
            out = torch.zeros(numel)
            handles.append(mesh.comm.gather("shard", [cut(full, size, index)], [out]))
            wanted.append(torch.cat([cut(term, size, i) for i, term in enumerate(terms)]))
        elif kind == 1:
            out = torch.zeros_like(cut(full, size, index))
            handles.append(mesh.comm.reduce("shard", [full], [out]))
            wanted.append(cut(sum(terms), size, index))
        else:
            out = torch.zeros(numel)
            handles.append(mesh.comm.all_reduce("shard", [full], [out]))
            wanted.append(sum(terms))
        got.append(out)
    generator = torch.Generator().manual_seed(order_seed + mesh.rank)
    for number in torch.randperm(count, generator=generator).tolist():
        handles[number].wait()
        assert torch.equal(got[number], wanted[number]), number
    handles[0].wait()  # again: does nothing
    return True


@both
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_many_in_flight_are_awaited_in_any_order(run, world, seed):
    assert all(run({"shard": world}, many_in_flight, seed, 15))


def in_place(mesh, numel):
    size, index = mesh.size, mesh.rank
    start, stop = shard_range(numel, size, index)
    gathered = torch.zeros(numel)
    gathered[start:stop] = data(mesh.rank, numel, torch.float32)[start:stop]
    mesh.comm.gather("shard", [gathered[start:stop]], [gathered]).wait()
    reduced = data(mesh.rank, numel, torch.float32)
    mesh.comm.reduce("shard", [reduced], [reduced[start:stop]]).wait()
    summed = data(mesh.rank, numel, torch.float32)
    mesh.comm.all_reduce("shard", [summed], [summed]).wait()
    return gathered, reduced[start:stop], summed


@both
@pytest.mark.parametrize("numel", [7, 4 * 3 * LARGE + 1])
def test_outputs_may_lie_in_their_inputs(run, numel):
    axes = {"shard": 3}
    for rank, (gathered, reduced, summed) in enumerate(run(axes, in_place, numel)):
        assert same(gathered, expected_gather(axes, rank, "shard", numel, torch.float32))
        assert same(reduced, expected_reduce(axes, rank, "shard", numel, torch.float32))
        assert same(summed, expected_sum(axes, rank, "shard", numel, torch.float32))


def lazy_conjugates(mesh):
    values = torch.complex(torch.ones(LARGE), torch.ones(LARGE)).conj()
    full = torch.zeros(2 * LARGE, dtype=torch.complex64)
    mesh.comm.gather("shard", [values], [full]).wait()
    small = torch.zeros(2, dtype=torch.complex64)
    mesh.comm.gather("shard", [values[:1]], [small]).wait()
    return full.imag.unique().tolist(), small.imag.unique().tolist()


@both
def test_a_lazy_conjugate_is_sent_as_what_it_means(run):
    assert run({"shard": 2}, lazy_conjugates) == [([-1.0], [-1.0])] * 2


def exchange(mesh, lengths):
    return [mesh.comm.exchange(bytes([mesh.rank]) * length[mesh.rank]) for length in lengths]


@both
def test_exchange_of_any_lengths(run):
    lengths = [(0, 0, 0), (1, 2, 3), (120, 0, 119), (121, 120, 5000), (0, 70_000, 0), (3, 3, 3)]
    wanted = [[bytes([rank]) * length[rank] for rank in range(3)] for length in lengths]
    assert run({"shard": 3}, exchange, lengths) == [wanted] * 3


def counted(mesh, numels, dtype):
    """Messages and bytes of one gather, one reduce and one all_reduce."""
    size, index = mesh.size, mesh.rank
    fulls = [torch.zeros(numel, dtype=dtype) for numel in numels]
    shards = [cut(full, size, index) for full in fulls]
    seen = [mesh.comm.stats()]
    for call in (
        functools.partial(mesh.comm.gather, "shard", shards, fulls),
        functools.partial(mesh.comm.reduce, "shard", fulls, shards),
        functools.partial(mesh.comm.all_reduce, "shard", fulls, fulls),
    ):
        call().wait()
        seen.append(mesh.comm.stats())
    return [
        (after.messages - before.messages, after.payload_bytes - before.payload_bytes)
        for before, after in itertools.pairwise(seen)
    ]


@both
@pytest.mark.parametrize("leaves", [1, 10, 1000])
def test_messages_do_not_grow_with_the_number_of_small_leaves(run, leaves):
    for world in (2, 4):
        for per_call in run({"shard": world}, counted, [2 * world] * leaves, torch.float32):
            peers, nbytes = world - 1, 4 * 2 * leaves
            assert per_call == [
                (peers, peers * nbytes),
                (peers, peers * nbytes),
                (peers, peers * nbytes * world),
            ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_virtual_ranks_count_the_messages_of_real_ones(dtype):
    axes = {"shard": 3}
    numels = [1, 0, 7, 3 * LARGE, 3 * LARGE + 1, LARGE, 2, 3 * LARGE - 1]
    virtual = on_local(axes, counted, numels, dtype)
    assert virtual == on_gloo(axes, counted, numels, dtype)
    assert virtual[0] != virtual[2]  # the last rank holds less


@both
def test_what_is_empty_is_not_sent(run):
    gather, reduce, all_reduce = zip(*run({"shard": 3}, counted, [1], torch.int8), strict=True)
    assert gather == ((2, 2), (0, 0), (0, 0))
    assert reduce == ((0, 0), (1, 1), (1, 1))
    assert all_reduce == ((2, 2),) * 3
    assert run({"shard": 3}, counted, [0, 0], torch.int8) == [[(0, 0)] * 3] * 3


def wrong_sizes(mesh):
    texts = []
    for fulls, shards in [
        ([torch.zeros(4)], [torch.zeros(3)]),
        ([torch.zeros(4)], [torch.zeros(2, dtype=torch.int64)]),
        ([torch.zeros(4)], []),
    ]:
        for call in (mesh.comm.gather, mesh.comm.all_reduce):
            with pytest.raises(LayoutError) as caught:
                call("shard", shards, fulls)
            texts.append(str(caught.value))
        with pytest.raises(LayoutError):
            mesh.comm.reduce("shard", fulls, shards)
    return texts


@both
def test_wrong_sizes_are_refused_before_anything_is_sent(run):
    texts = run({"shard": 2}, wrong_sizes)[0]
    assert "expected  2 elements of torch.float32" in texts[0]
    assert "got       3 elements of torch.float32" in texts[0]
    assert "got       2 elements of torch.int64" in texts[2]


def under_autograd(mesh):
    weight = torch.ones(2, requires_grad=True)
    full = torch.zeros(4)
    mesh.comm.gather("shard", [weight], [full]).wait()
    total = torch.zeros(4)
    mesh.comm.all_reduce("shard", [full * weight.sum()], [total]).wait()
    return full.requires_grad, total.requires_grad, total.tolist()


@both
def test_collectives_leave_no_trace_in_autograd(run):
    assert run({"shard": 2}, under_autograd) == [(False, False, [4.0] * 4)] * 2
