"""A long-lived step: bounded notes of structures, checked pieces, buffers that are not lent out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
from zfunc import optim, tree


def scaled_loss(params: dict[str, Any], x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean() * params["scale"]


def test_notes_of_structures_are_bounded() -> None:
    mesh = zfunc.mesh()
    step = zfunc.shard(scaled_loss, mesh)
    forward = zfunc.infer(scaled_loss, mesh)
    for number in range(70):
        params = {"w": torch.ones(2, 1), "scale": float(number)}
        sharded = zfunc.scatter(params, mesh, zfunc.Flat())
        loss, grads = step.value_and_grad(sharded, torch.eye(2))
        assert float(loss) == number and float(forward(sharded, torch.eye(2))) == number
        assert zfunc.gather(grads)["w"].tolist() == [[number], [number]]
    training = step._training
    assert len(training.tables) == 64 and len(forward._tables) == 64
    assert len(training.programs._calls) <= 64 and len(training.programs.compiled) <= 64


def piece_of_another_shape(mesh: zfunc.Mesh) -> str:
    step = zfunc.shard(lambda p, x: (x @ p["w"]).sum(), mesh)
    state = step.init({"w": torch.ones(4, 2)}, optim.sgd(0.5))
    cut = tree.map(lambda piece: piece[:1], state.params)
    with pytest.raises(zfunc.LayoutError) as refused:
        step.value_and_grad(cut, torch.ones(1, 4))
    after, metrics = step(state, torch.ones(1, 4))
    assert metrics["loss"] == 8 and zfunc.gather(after.params)["w"].tolist() == [[0.5, 0.5]] * 4
    return str(refused.value)


def test_a_piece_of_another_shape_is_named_and_the_state_stays_valid() -> None:
    for message in zfunc.local_mesh(2).run(piece_of_another_shape):
        assert (
            "params['w']" in message and "expected  [4]" in message and "got       [1]" in message
        )


def writing_loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    params["seen"].add_(1)
    return (x * params["w"]).sum()


def test_a_write_into_a_frozen_leaf_is_refused_and_leaves_it_as_it_was() -> None:
    step = zfunc.shard(writing_loss, zfunc.mesh(), capture="dynamic")
    params = {"w": torch.ones(2), "seen": torch.zeros(2, dtype=torch.int64)}
    state = step.init(params, optim.sgd(0.5))
    with pytest.raises(zfunc.CaptureError, match="seen"):
        step(state, torch.ones(2))
    assert zfunc.gather(state.params)["seen"].tolist() == [0, 0]


def failing_init(mesh: zfunc.Mesh) -> str:
    step = zfunc.shard(lambda p: p["w"].sum(), mesh)

    def init() -> dict[str, Tensor]:
        return {"w": torch.ones(2, 2)[torch.tensor([0, 9 if mesh.rank == 1 else 1])]}

    with pytest.raises((IndexError, zfunc.RemoteRankError)) as raised:
        step.init(init, optim.sgd(0.1))
    return f"{type(raised.value).__name__}: {raised.value}"


def test_an_init_that_fails_on_one_rank_is_an_error_on_every_rank() -> None:
    first, second = zfunc.local_mesh(2).run(failing_init)
    assert first.startswith("RemoteRankError: init failed on rank 1: IndexError: index 9")
    assert second.startswith("IndexError: index 9")
