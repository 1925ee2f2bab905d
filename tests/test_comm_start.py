"""Making meshes: from a launcher's environment, from a device mesh, alone, and in vain."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.ranks import run_ranks, spawn_ranks
from zfunc.comm import as_mesh, mesh
from zfunc.comm.blame import Watch
from zfunc.comm.compat import holds_store
from zfunc.comm.control import Control
from zfunc.comm.start import choose_device, connect
from zfunc.errors import LayoutError, RankLostError
from zfunc.meshes import Mesh


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launched(rank, world, port):
    """What a launcher sets."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


@pytest.fixture
def no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_one_process_needs_no_group(no_launcher):
    alone = mesh(device="cpu")
    assert (alone.axes, alone.rank, alone.size, alone.comm) == ({"shard": 1}, 0, 1, None)
    assert not alone.is_abstract
    assert not dist.is_initialized()
    assert mesh({"replica": 1, "shard": 1}, device="cpu").size == 1


def test_more_ranks_than_processes_are_refused(no_launcher):
    with pytest.raises(LayoutError, match="sizes that multiply to 1"):
        mesh({"shard": 2}, device="cpu")


@pytest.mark.parametrize("axes", [{}, {"shard": 0}, {"shard": -1}])
def test_axes_without_ranks_are_refused(no_launcher, axes):
    with pytest.raises(LayoutError):
        mesh(axes, device="cpu")


def test_a_device_that_is_given_is_taken():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device(torch.device("meta")) == torch.device("meta")


def test_a_process_outside_the_mesh_is_refused():
    with pytest.raises(LayoutError, match="process 3 is not part of the mesh"):
        connect({"shard": 2}, (0, 1), 3, device=torch.device("cpu"), timeout_s=1.0)


def from_launcher(pool_mesh, port):
    rank, world = pool_mesh.rank, pool_mesh.size
    launched(rank, world, port)
    flat = mesh(device="cpu", timeout_s=20)
    grid = mesh({"replica": 2, "shard": 2}, device="cpu", timeout_s=20)
    again = mesh({"replica": 2, "shard": 2}, device="cpu", timeout_s=20)
    with pytest.raises(LayoutError, match="sizes that multiply to 4"):
        mesh({"shard": 3}, device="cpu")
    totals = []
    for axis in grid.axes:
        total = torch.zeros(1)
        grid.comm.all_reduce(axis, [torch.tensor([float(rank)])], [total]).wait()
        totals.append(total.item())
    said = flat.comm.exchange(str(rank).encode())
    dist.destroy_process_group()
    return str(flat), str(grid), grid == again, grid.processes, grid.rank, totals, said


def test_meshes_of_the_launchers_world():
    with spawn_ranks(4, from_launcher, free_port(), mesh_timeout_s=20) as ranks:
        outcomes = ranks.outcomes(4, timeout_s=60)
    for rank, outcome in enumerate(outcomes):
        assert not outcome.text, outcome.text
        replica, shard = divmod(rank, 2)
        totals = [float(shard + (2 + shard)), float(2 * replica + (2 * replica + 1))]
        assert outcome.value == (
            "mesh[shard:4]",
            "mesh[replica:2 shard:2]",
            True,
            (0, 1, 2, 3),
            rank,
            totals,
            [b"0", b"1", b"2", b"3"],
        )


def from_device_mesh(pool_mesh, port):
    rank = pool_mesh.rank
    launched(rank, pool_mesh.size, port)
    dist.init_process_group("gloo")
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, part = as_mesh(device_mesh), as_mesh(device_mesh["tp"])
    nameless = as_mesh(DeviceMesh("cpu", [3, 2, 1, 0]))
    with pytest.raises(LayoutError, match="has no names"):
        as_mesh(DeviceMesh("cpu", [[0, 1], [2, 3]]))
    total = torch.zeros(1)
    part.comm.all_reduce("tp", [torch.tensor([float(rank)])], [total]).wait()
    heard = nameless.comm.exchange(bytes([rank]))
    dist.destroy_process_group()
    return whole.axes, part.axes, part.processes, total.item(), nameless.rank, b"".join(heard)


def test_a_device_mesh_becomes_a_mesh():
    with spawn_ranks(4, from_device_mesh, free_port(), mesh_timeout_s=20) as ranks:
        outcomes = ranks.outcomes(4, timeout_s=60)
    for rank, outcome in enumerate(outcomes):
        assert not outcome.text, outcome.text
        row = rank // 2 * 2
        processes = (row, row + 1)
        assert outcome.value == (
            {"dp": 2, "tp": 2},
            {"tp": 2},
            processes,
            float(sum(processes)),
            3 - rank,
            bytes([3, 2, 1, 0]),
        )


def test_a_mesh_stays_as_it_is():
    own = Mesh({"shard": 1}, processes=(0,))
    assert as_mesh(own) is own


def absent_at_launch(pool_mesh, port):
    """Rank 1 never asks for the mesh."""
    if pool_mesh.rank == 1:
        return "absent", 0.0
    launched(pool_mesh.rank, pool_mesh.size, port)
    started = time.perf_counter()
    try:
        mesh(device="cpu", timeout_s=2)
    except RankLostError as error:
        return str(error), time.perf_counter() - started
    return "nothing", 0.0


def test_a_process_that_never_comes_is_an_error_in_time():
    with spawn_ranks(2, absent_at_launch, free_port(), mesh_timeout_s=20) as ranks:
        outcome = ranks.outcomes(2, timeout_s=60)[0]
    assert not outcome.text, outcome.text
    text, seconds = outcome.value
    assert "lost during the start of the process group" in text
    assert 1.5 < seconds < 20


def absent_at_mesh(pool_mesh, folder):
    """Rank 1 is there but never makes the mesh."""
    if pool_mesh.rank == 1:
        return "absent"
    store = dist.FileStore(os.path.join(folder, "store"), 3)
    where = torch.device("cpu")
    with pytest.raises(RankLostError) as caught:
        connect({"shard": 3}, (0, 1, 2), pool_mesh.rank, device=where, timeout_s=2, store=store)
    return str(caught.value)


def test_who_does_not_come_to_a_mesh_is_named(tmp_path):
    texts = run_ranks(3, absent_at_mesh, str(tmp_path))
    for rank in (0, 2):
        assert texts[rank].startswith("ranks [1] did not come")
        assert "expected  3 ranks within 2 s" in texts[rank]


class GoneStore:
    """A store whose host has died."""

    def set(self, key, value):
        raise RuntimeError("connection reset")


class FrozenStore:
    """A store whose host never answers."""

    def set(self, key, value):
        time.sleep(60)
        raise RuntimeError("no answer")


@pytest.mark.parametrize("store", [GoneStore(), FrozenStore()])
def test_blame_without_a_store_falls_on_the_rank_that_was_waited_for(store):
    watch = Watch(store, 0, 5.0)
    watch.check()
    started = time.perf_counter()
    error = watch.lost(2, "gather 7", RuntimeError("Connection closed by peer [::1]:1"))
    assert time.perf_counter() - started < 10
    assert "rank 2 was lost during gather 7" in str(error)
    assert "got       its connection closed" in str(error)
    with pytest.raises(RankLostError, match="gather 7"):
        watch.check()
    later = watch.lost(1, "reduce 8", RuntimeError("Timed out"))
    assert str(later) == str(error)


@pytest.mark.parametrize("store", [GoneStore(), FrozenStore()])
def test_a_store_that_no_longer_answers_is_lost_with_the_rank_that_holds_it(store):
    error = Watch(store, 0, 5.0, holder=3).lost(2, "gather 7", RuntimeError("Timed out"))
    assert "rank 3 was lost during gather 7" in str(error)


def test_who_holds_the_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    assert holds_store(store) and holds_store(dist.PrefixStore("a", dist.PrefixStore("b", store)))
    assert not holds_store(client) and not holds_store(dist.HashStore())


def test_the_rank_that_holds_the_store_stays_until_others_have_read_it():
    store = dist.HashStore()
    watch = Watch(store, 1, 5.0, holder=1)
    started = time.perf_counter()
    watch.lost(2, "gather 7", RuntimeError("Timed out"))
    assert time.perf_counter() - started > 1.9, "asking for a second, waiting for a second"
    assert store.get("lost/1") == b"2"


def test_blame_that_comes_back_says_so():
    store = dist.HashStore()
    store.set("lost/1", "2")
    store.set("lost/2", "0")
    error = Watch(store, 0, 5.0).lost(1, "gather 0", RuntimeError("Timed out waiting 5000ms"))
    assert "gave up on this rank (0) before gather 0" in str(error)
    assert "got       no answer" in str(error)


class EchoBackend:
    """One peer that answers with the frames it was sent."""

    def __init__(self):
        self.sent = []
        self.waiting = []

    def send(self, tensors, rank, tag):
        target = self.waiting.pop(0)
        target.copy_(tensors[0])
        self.sent.append(tensors[0].numel())
        return self

    def recv(self, tensors, rank, tag):
        self.waiting.append(tensors[0])
        return self

    def wait(self):
        pass


@pytest.mark.parametrize(("length", "messages"), [(0, [128]), (120, [128]), (121, [128, 1])])
def test_a_small_payload_takes_one_message(length, messages):
    backend = EchoBackend()
    control = Control(backend, 0, 2, Watch(dist.HashStore(), 0, 1.0))
    payload = bytes(range(length))
    assert control.exchange(payload) == [payload, payload]
    assert backend.sent == messages
    assert control.count == 1
