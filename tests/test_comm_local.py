"""Virtual ranks: turns, generators, modes and failures. The collectives are in test_comm."""

from __future__ import annotations

import random
import signal
import threading

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from zfunc.comm import baton, local_mesh
from zfunc.errors import LayoutError, ProgramMismatchError, RankLostError, RemoteRankError


def draw():
    """One number of every global generator; numpy's normals come in pairs, so its cache counts."""
    return torch.rand(()).item(), np.random.randn(), np.random.rand(), random.random()


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def test_results_come_in_rank_order_with_the_arguments():
    assert local_mesh(3).run(lambda mesh, *args: (mesh.rank, args), 1, 2) == [
        (0, (1, 2)),
        (1, (1, 2)),
        (2, (1, 2)),
    ]


def test_views_differ_only_in_rank():
    views = local_mesh({"replica": 2, "shard": 3}).run(lambda mesh: mesh)
    assert [view.rank for view in views] == list(range(6))
    assert [(view.index("replica"), view.index("shard")) for view in views] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert all(view == views[0] and view.size == 6 and not view.is_abstract for view in views)


def test_one_rank_has_no_communicator():
    assert local_mesh(1).run(lambda mesh: (mesh.comm, mesh.size, mesh.rank)) == [(None, 1, 0)]


@pytest.mark.parametrize("axes", [0, -1, {}, {"shard": 0}])
def test_sizes_below_one_are_refused(axes):
    with pytest.raises(LayoutError):
        local_mesh(axes)


def test_only_one_rank_runs_at_a_time():
    running = []
    most = []

    def busy(mesh):
        for _ in range(20):
            running.append(mesh.rank)
            most.append(len(running))
            torch.ones(64, 64) @ torch.ones(64, 64)  # releases the interpreter lock
            running.remove(mesh.rank)
            mesh.comm.exchange(b"")
        return threading.get_ident()

    assert len(set(local_mesh(4).run(busy))) == 4
    assert max(most) == 1


def test_the_order_of_turns_is_the_same_every_time():
    def trace(seen):
        def fn(mesh):
            for step in range(4):
                seen.append((mesh.rank, step))
                full = torch.zeros(3)
                pending = mesh.comm.gather("shard", [torch.ones(1)], [full])
                seen.append((mesh.rank, step, "issued"))
                pending.wait()

        local_mesh(3).run(fn)
        return seen

    assert trace([]) == trace([])


def test_a_rank_runs_on_until_it_must_wait():
    seen = []

    def fn(mesh):
        full = torch.zeros(2)
        seen.append(f"{mesh.rank} issues")
        pending = mesh.comm.gather("shard", [torch.ones(1)], [full])
        seen.append(f"{mesh.rank} waits")
        pending.wait()
        seen.append(f"{mesh.rank} has")

    local_mesh(2).run(fn)
    assert seen == ["0 issues", "0 waits", "1 issues", "1 waits", "1 has", "0 has"]


def test_what_is_deposited_is_a_copy():
    def fn(mesh):
        shard, full, total = torch.full((1,), 1.0 + mesh.rank), torch.zeros(2), torch.zeros(1)
        gathered = mesh.comm.gather("shard", [shard], [full])
        summed = mesh.comm.all_reduce("shard", [shard], [total])
        shard.fill_(100)
        gathered.wait()
        summed.wait()
        return full.tolist(), total.tolist()

    assert local_mesh(2).run(fn) == [([1.0, 2.0], [3.0])] * 2


def test_outputs_are_written_in_wait_and_not_before():
    def fn(mesh):
        full = torch.full((2,), -1.0)
        pending = mesh.comm.gather("shard", [torch.ones(1)], [full])
        mesh.comm.exchange(b"")  # by now every rank has deposited
        before = full.tolist()
        pending.wait()
        return before, full.tolist()

    assert local_mesh(2).run(fn) == [([-1.0, -1.0], [1.0, 1.0])] * 2


def test_each_rank_draws_as_if_it_were_alone():
    seed_all(5)
    np.random.randn()  # leaves one normal in numpy's cache
    saved = torch.get_rng_state(), np.random.get_state(), random.getstate()
    alone = [draw() for _ in range(5)]
    torch.set_rng_state(saved[0])
    np.random.set_state(saved[1])
    random.setstate(saved[2])

    def fn(mesh):
        numbers = []
        for _ in range(5):
            numbers.append(draw())
            mesh.comm.exchange(b"")
        return numbers

    assert local_mesh(3).run(fn) == [alone] * 3
    assert draw() == alone[0]  # the caller's generators have not moved


def test_a_rank_keeps_the_seed_that_it_sets():
    def fn(mesh):
        seed_all(mesh.rank)
        mesh.comm.exchange(b"")
        first = draw()
        mesh.comm.exchange(b"")
        return [first, draw()]

    results = local_mesh(3).run(fn)
    for rank, numbers in enumerate(results):
        seed_all(rank)
        assert numbers == [draw(), draw()]


def test_other_bit_generators_of_numpy_are_kept_apart_too():
    mine = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        alone = [np.random.randn() for _ in range(3)]
        np.random.set_bit_generator(np.random.PCG64(3))

        def fn(mesh):
            numbers = []
            for _ in range(3):
                numbers.append(np.random.randn())
                mesh.comm.exchange(b"")
            return numbers

        assert local_mesh(2).run(fn) == [alone, alone]
        assert np.random.randn() == alone[0]
    finally:
        np.random.set_bit_generator(mine)


def test_generators_are_restored_after_a_failure():
    seed_all(1)
    expected = draw()
    seed_all(1)

    def fn(mesh):
        draw()
        mesh.comm.exchange(b"")
        raise ValueError(mesh.rank)

    with pytest.raises(ValueError):
        local_mesh(2).run(fn)
    assert draw() == expected


@pytest.mark.parametrize("grad", [True, False])
def test_ranks_have_the_modes_of_the_caller(grad):
    def fn(mesh):
        mesh.comm.exchange(b"")
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.ones(()).device.type,
        )

    with torch.set_grad_enabled(grad):
        assert local_mesh(2).run(fn) == [(grad, False, False, "cpu")] * 2
    with torch.inference_mode(grad):
        assert local_mesh(2).run(fn)[0][1] is grad
    with torch.autocast("cpu", torch.bfloat16, enabled=grad):
        assert local_mesh(2).run(fn)[0][2] is grad
    with torch.device("meta"):
        assert local_mesh(2).run(fn)[0][3] == "meta"


def test_modes_of_a_rank_stay_with_it():
    def fn(mesh):
        with torch.set_grad_enabled(mesh.rank == 0):
            mesh.comm.exchange(b"")
            inside = torch.is_grad_enabled()
            mesh.comm.exchange(b"")
        return inside, torch.is_grad_enabled()

    assert local_mesh(2).run(fn) == [(True, True), (False, True)]


def test_tracing_works_inside_ranks():
    def loss(weight, x):
        return torch.tanh(x @ weight).sum()

    def fn(mesh):
        weight, x = torch.ones(3, 3), torch.full((2, 3), float(mesh.rank))
        graphs = []
        for _ in range(2):
            graphs.append(make_fx(torch.func.grad(loss), tracing_mode="fake")(weight, x).code)
            mesh.comm.exchange(b"")
        return graphs

    results = local_mesh(3).run(fn)
    assert all(result == [results[0][0]] * 2 for result in results)


def test_meshes_may_be_nested():
    def inner(mesh):
        return mesh.comm.exchange(bytes([mesh.rank]))

    def outer(mesh):
        before = draw()
        nested = local_mesh(2).run(inner)
        return nested, before, draw(), len(mesh.comm.exchange(b""))

    first, second = local_mesh(2).run(outer)
    assert first == second
    assert first[0] == [[b"\0", b"\1"]] * 2


def test_the_lowest_rank_with_an_exception_of_its_own_is_raised():
    def fn(mesh):
        if mesh.rank in (2, 3):
            raise ValueError(f"rank {mesh.rank}")
        mesh.comm.exchange(b"")

    with pytest.raises(ValueError, match="rank 2"):
        local_mesh(4).run(fn)


def test_an_answer_to_another_ranks_failure_is_not_an_exception_of_its_own():
    def fn(mesh):
        if mesh.rank == 3:
            raise KeyError("cause")
        try:
            mesh.comm.exchange(b"")
        except RankLostError as lost:
            if mesh.rank == 0:
                raise RemoteRankError("rank 3 failed", rank=3) from lost
            if mesh.rank == 1:
                raise TypeError("while handling it") from lost
            raise

    with pytest.raises(KeyError, match="cause"):
        local_mesh(4).run(fn)


def test_a_failure_that_ranks_agreed_on_is_raised_as_it_was():
    def fn(mesh):
        failed = mesh.comm.exchange(b"x" if mesh.rank == 1 else b"").index(b"x")
        if mesh.rank == failed:
            raise ValueError("of rank 1")
        raise RemoteRankError("rank 1 failed", rank=failed)

    with pytest.raises(ValueError, match="of rank 1"):
        local_mesh(3).run(fn)


def test_a_rank_that_returns_while_others_wait_is_an_error_at_once():
    seen = []

    def fn(mesh):
        if mesh.rank == 1:
            return
        try:
            mesh.comm.exchange(b"")
        except RankLostError as error:
            seen.append(str(error))
            raise

    with pytest.raises(
        RankLostError, match="rank 1 ended while rank 0 waited for it in exchange 0"
    ):
        local_mesh(3).run(fn)
    assert len(seen) == 2


def test_a_rank_may_end_once_it_has_deposited():
    def fn(mesh):
        full = torch.zeros(2)
        pending = mesh.comm.gather("shard", [torch.ones(1)], [full])
        if mesh.rank == 0:
            return full.tolist()
        pending.wait()
        return full.tolist()

    assert local_mesh(2).run(fn) == [[0.0, 0.0], [1.0, 1.0]]


def gathers(mesh, numel):
    size = numel // 2
    return mesh.comm.gather("shard", [torch.zeros(size)], [torch.zeros(numel)])


def reduces(mesh, numel):
    return mesh.comm.reduce("shard", [torch.zeros(numel)], [torch.zeros(numel // 2)])


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        (gathers, reduces, ["rank 0: gather 0 of [4 x float32]", "rank 1: reduce 0 of"]),
        (
            gathers,
            lambda mesh, numel: gathers(mesh, numel + 2),
            ["rank 0: gather 0 of [4 x float32]", "rank 1: gather 0 of [6 x float32]"],
        ),
        (
            gathers,
            lambda mesh, numel: mesh.comm.exchange(b""),
            ["rank 0: gather 0 of", "rank 1: exchange 0"],
        ),
    ],
)
def test_calls_that_do_not_fit_are_an_error_on_every_rank(first, second, texts):
    errors = []

    def fn(mesh):
        try:
            call = (first if mesh.rank == 0 else second)(mesh, 4)
            call.wait()
        except ProgramMismatchError as error:
            errors.append(str(error))
            raise

    with pytest.raises(ProgramMismatchError) as caught:
        local_mesh(2).run(fn)
    assert len(errors) == 2
    assert all(text in str(caught.value) for text in texts)


def test_crosswise_waits_are_a_mismatch_and_not_a_hang():
    def fn(mesh):
        axes = ["replica", "shard"]
        if mesh.index("shard") == mesh.index("replica"):
            axes.reverse()  # each rank waits for the next one in a circle of four
        for axis in axes:
            total = torch.zeros(1)
            mesh.comm.all_reduce(axis, [torch.ones(1)], [total]).wait()

    with pytest.raises(ProgramMismatchError, match="all_reduce 0"):
        local_mesh({"replica": 2, "shard": 2}).run(fn)


def test_drain_abandons_what_is_in_flight():
    def fn(mesh):
        full = torch.full((2,), -1.0)
        pending = mesh.comm.gather("shard", [torch.ones(1)], [full])
        mesh.comm.drain()
        pending.wait()
        after = torch.zeros(2)
        mesh.comm.gather("shard", [torch.ones(1)], [after]).wait()
        return full.tolist(), after.tolist()

    assert local_mesh(2).run(fn) == [([-1.0, -1.0], [1.0, 1.0])] * 2


def test_an_interrupt_of_the_caller_ends_the_run():
    caller = threading.main_thread().ident

    def fn(mesh):
        if mesh.rank == 1:
            signal.pthread_kill(caller, signal.SIGINT)
        for _ in range(100_000):
            mesh.comm.exchange(b"")

    # A process that was started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            local_mesh(2).run(fn)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_an_interrupt_after_the_last_rank_has_ended(monkeypatch):
    """The signal was there before, and is seen when the caller's wait returns."""

    class Late:
        def acquire(self, timeout=-1):
            ended.wait()
            raise KeyboardInterrupt

        def release(self):
            ended.set()

    ended = threading.Event()
    first = baton.Baton.__init__

    def begin(self, *args):
        first(self, *args)
        self._over = Late()

    monkeypatch.setattr(baton.Baton, "__init__", begin)
    with pytest.raises(KeyboardInterrupt):
        local_mesh(2).run(lambda mesh: mesh.comm.exchange(b""))
