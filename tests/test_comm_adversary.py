"""The adversarial communicator is right in the end and as bad as promised until then."""

from __future__ import annotations

import pytest
import torch

from tests.adversary import InjectedFault, adversary
from tests.ranks import run_ranks
from zfunc.comm import local_mesh
from zfunc.meshes import Mesh


def start(mesh, seed, count=4):
    comm = adversary(mesh, seed).comm
    fulls = [torch.zeros(2 * mesh.size) for _ in range(count)]
    shards = [torch.full((2,), float(10 * i + mesh.rank)) for i in range(count)]
    handles = [
        comm.gather("shard", [shard], [full]) for shard, full in zip(shards, fulls, strict=True)
    ]
    return comm, shards, fulls, handles


def spoilt_until_awaited(mesh, seed):
    _, _, fulls, handles = start(mesh, seed)
    for number in (2, 0, 3, 1):
        assert fulls[number].isnan().all()
        handles[number].wait()
        wanted = [float(10 * number + rank) for rank in range(mesh.size) for _ in range(2)]
        assert fulls[number].tolist() == wanted
    return True


@pytest.mark.parametrize("seed", range(4))
def test_outputs_are_nan_until_awaited_and_then_right(seed):
    assert all(local_mesh(3).run(spoilt_until_awaited, seed))


def test_the_same_on_processes():
    assert all(run_ranks(2, spoilt_until_awaited, 1))


def test_a_change_in_flight_is_found_out():
    def fn(mesh, seed):
        _, shards, fulls, handles = start(mesh, seed)
        for shard in shards:
            shard.fill_(-1.0)
        for handle in handles:
            handle.wait()
        return any((full == -1.0).any().item() for full in fulls)

    assert any(all(local_mesh(2).run(fn, seed)) for seed in range(4))


def test_calls_complete_in_another_order_for_another_seed():
    orders = set()

    def fn(mesh, seed):
        seen = []
        comm = adversary(mesh, seed).comm
        issue = comm.inner.gather

        def spy(axis, shards, fulls):
            seen.append(int(shards[0][0]) // 10)
            return issue(axis, shards, fulls)

        comm.inner.gather = spy
        shards = [torch.full((1,), float(10 * i)) for i in range(6)]
        fulls = [torch.zeros(2) for _ in range(6)]
        handles = [
            comm.gather("shard", [shard], [full]) for shard, full in zip(shards, fulls, strict=True)
        ]
        for handle in handles:
            handle.wait()
        return tuple(seen)

    for seed in range(8):
        first, second = local_mesh(2).run(fn, seed)
        assert first == second
        assert sorted(first) == list(range(6))
        orders.add(first)
    assert len(orders) > 1


@pytest.mark.parametrize("rank", [None, 1])
def test_the_asked_call_fails(rank):
    def fn(mesh):
        comm = adversary(mesh, 0, fail_at=2, rank=rank).comm
        reached = 0
        try:
            for _ in range(4):
                comm.exchange(b"")
                reached += 1
        except InjectedFault:
            return reached
        return reached

    if rank is None:
        assert local_mesh(2).run(fn) == [2, 2]
    else:
        with pytest.raises(RuntimeError, match="rank 1 ended while rank 0 waited"):
            local_mesh(2).run(fn)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.complex64], ids=str)
def test_outputs_without_nan_are_spoilt_too(dtype):
    def fn(mesh):
        comm = adversary(mesh, 0).comm
        full = torch.zeros(2, dtype=dtype)
        handle = comm.gather("shard", [torch.zeros(1, dtype=dtype)], [full])
        before = full.clone()
        handle.wait()
        return bool((before != 0).all()), bool((full == 0).all())

    assert local_mesh(2).run(fn) == [(True, True)] * 2


def test_a_mesh_of_one_rank_is_left_alone():
    alone = Mesh({"shard": 1}, processes=(0,))
    assert adversary(alone, 0) is alone
