"""Who owns the buffers of collectives: the handle until it is awaited, nobody afterwards."""

from __future__ import annotations

import gc

import torch

from tests.ranks import run_ranks

LARGE = 256 * 1024 // 4  # elements in fp32 of a piece that travels alone


def dropped(mesh):
    """Issues collectives on tensors and handles that nobody keeps."""
    full, total = torch.zeros(2 * LARGE), torch.zeros(4)
    mesh.comm.gather("shard", [torch.full((LARGE,), 1.0 + mesh.rank)], [full])
    mesh.comm.all_reduce("shard", [torch.full((4,), 1.0 + mesh.rank)], [total])
    gc.collect()
    trash = [torch.full((LARGE,), -1.0) for _ in range(8)]  # where freed memory would be reused
    mesh.comm.drain()
    del trash
    return full[0].item(), full[-1].item(), total.tolist()


def test_what_is_in_flight_owns_its_buffers():
    assert run_ranks(2, dropped) == [(1.0, 2.0, [3.0] * 4)] * 2


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def kept(mesh):
    """Live tensors after one round and after many."""
    fulls = [torch.zeros(2 * LARGE), torch.zeros(4), torch.zeros(6)]
    shards = [torch.zeros(LARGE), torch.zeros(2), torch.zeros(3)]
    counts = []
    for rounds in (1, 10):
        for _ in range(rounds):
            handles = [
                mesh.comm.gather("shard", shards, fulls),
                mesh.comm.all_reduce("shard", fulls, fulls),
                mesh.comm.reduce("shard", fulls, shards),
            ]
            for handle in handles:
                handle.wait()
        counts.append(live_tensors())  # with the awaited handles still there
    return counts


def test_an_awaited_handle_keeps_no_buffers():
    for before, after in run_ranks(2, kept):
        assert before == after
