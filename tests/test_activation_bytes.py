"""The predicted peak of activations against the storages of a run, under every policy.

The tracker performs a program one op at a time. What is alive during an op is what was there before
it and what is there after it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc
from tests.harness import ranks
from zfunc import optim, policies, tree
from zfunc.execute import Executor, Inputs

WIDTH, LAYERS, VOCAB = 32, 6, 400


def make() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    blocks = [{"up": normal(WIDTH, 4 * WIDTH), "down": normal(4 * WIDTH, WIDTH)}] * LAYERS
    return {"emb": normal(VOCAB, WIDTH), "head": normal(WIDTH, VOCAB), "blocks": blocks}


def block(h: Tensor, p: Any) -> Tensor:
    hidden = zfunc.name(F.gelu(F.layer_norm(h, (WIDTH,)) @ p["up"]), "hidden")
    return h + F.dropout(hidden @ p["down"], 0.1)


def loss_with(policy: Any, tiles: int) -> Any:
    def total(h: Tensor, targets: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy(h @ head, targets, reduction="sum")

    def loss(params: Any, tokens: Tensor) -> Tensor:
        h = params["emb"][tokens[:, :-1]]
        for p in params["blocks"]:
            h = block(h, p) if policy is None else zfunc.remat(block, policy)(h, p)
        part = zfunc.tiled(total, (0, 0, None), tiles, out="sum")
        return part(h.flatten(0, 1), tokens[:, 1:].flatten(), params["head"])

    return loss


def alive(frame: Any, executor: Executor) -> dict[int, int]:
    values = executor.program.values
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for value, tensor in enumerate(frame.env)
        if isinstance(tensor, Tensor) and values[values[value].owner].role == "activation"
    }


def peaks(mesh: zfunc.Mesh, policy: Any, whole: Any, tiles: int) -> tuple[int, int]:
    """Measured and predicted."""
    tokens = torch.randint(0, VOCAB, (4, 65), generator=torch.Generator().manual_seed(mesh.rank))
    step = zfunc.shard(loss_with(policy, tiles), mesh, remat=whole)
    state = step.init(make(), optim.sgd(0.1))
    lowered = step.lower(state, tokens)
    executor = Executor(lowered.program, mesh, max_segment_ops=1)
    leaves = [x.local for x in tree.leaves(state.params, is_leaf=lambda x: hasattr(x, "local"))]
    frame = executor.bind(Inputs(leaves, [[tokens]], [None], update=lambda grads, verdict: None))
    most, before = 0, {}
    for item in executor.schedule:
        executor.perform(frame, item)
        if frame.error is not None:
            raise frame.error
        after = alive(frame, executor)
        most, before = max(most, sum((before | after).values())), after
    return most, lowered.memory_analysis().peak_activation_bytes


CASES = {
    "none": (None, None, 1),
    "nothing": (policies.nothing, None, 1),
    "matmuls": (policies.matmuls, None, 1),
    "names": (policies.names("hidden"), None, 1),
    "budget": (policies.budget(100_000), None, 1),
    "budget of all": (None, policies.budget(400_000), 1),
    "tiles": (None, None, 8),
    "nothing, tiles": (policies.nothing, None, 8),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[int, int]]]:
    """What each case takes on both ranks."""
    return {case: ranks(2, peaks, *options) for case, options in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_measured_peak_is_the_predicted_one(case: str, found: Any) -> None:
    for measured, predicted in found[case]:
        assert measured == predicted


def test_remat_of_blocks_and_tiles_of_logits_leave_a_quarter(found: Any) -> None:
    for rank in range(2):
        measured = {case: rows[rank][0] for case, rows in found.items()}
        assert measured["nothing"] < measured["names"] < measured["none"]
        assert measured["nothing"] <= measured["budget"] <= measured["none"]
        assert measured["nothing, tiles"] <= measured["none"] / 4
