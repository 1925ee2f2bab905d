"""Loss scaling: exact sequences of scales, gradients that no scale changes, steps left out."""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zfunc
from tests.harness import assert_equal, bits, gathered, integers, ranks
from zfunc import LossScale, Precision, optim, schedules
from zfunc.scaling import Scaler, advanced, fresh_scaler

RATE = 2.0**-6
AXES: list[Any] = [{"shard": 1}, {"shard": 3}, {"replica": 2, "shard": 2}]


class Reference:
    """The scale as a loop over iterations that remembers the last one that overflowed."""

    def __init__(self, policy: LossScale):
        self.policy = policy
        self.scale = 2.0**policy.initial_power
        self.iteration, self.last, self.patience = 0, -1, policy.hysteresis

    def step(self, overflow: bool) -> float:
        policy = self.policy
        if overflow:
            if policy.hysteresis == 1 or self.patience == 1:
                if self.scale == policy.minimum and policy.at_minimum == "raise":
                    return math.nan
                self.scale = max(self.scale / 2, policy.minimum)
            else:
                self.patience -= 1
            self.last = self.iteration
        else:
            if policy.consecutive:
                self.patience = policy.hysteresis
            since = self.iteration - self.last - 1
            if since > 0 and since % policy.window == 0:
                if not policy.consecutive:
                    self.patience = policy.hysteresis
                self.scale *= 2
        self.iteration += 1
        return self.scale


policies = st.builds(
    LossScale,
    initial_power=st.integers(0, 6),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    consecutive=st.booleans(),
    minimum=st.sampled_from([1.0, 0.25]),
    at_minimum=st.sampled_from(["raise", "stay"]),
)


@given(policies, st.lists(st.booleans(), max_size=40))
def test_the_sequence_of_scales(policy: LossScale, overflows: list[bool]) -> None:
    reference, scaler = Reference(policy), fresh_scaler(policy)
    for overflow in overflows:
        assert scaler is not None
        wanted = reference.step(overflow)
        if math.isnan(wanted):
            with pytest.raises(zfunc.NonFiniteError, match="loss scale is at its minimum"):
                advanced(policy, scaler, finite=False)
            return
        scaler = advanced(policy, scaler, finite=not overflow)
        assert float(scaler.scale) == wanted


def test_sequences_written_out() -> None:
    """Window 2, patience 2: the doubling needs two steps more than the first one."""

    def scales(pattern: str, **settings: Any) -> list[float]:
        policy = LossScale(initial_power=4, window=2, **settings)
        scaler, seen = fresh_scaler(policy), []
        for step in pattern:
            assert scaler is not None
            scaler = advanced(policy, scaler, finite=step == ".")
            seen.append(float(scaler.scale))
        return seen

    assert scales(".....") == [16, 16, 32, 32, 64]
    assert scales("xx...x") == [16, 8, 8, 8, 16, 16]
    assert scales("x.x.x", consecutive=True) == [16] * 5
    assert scales("x.x.x", consecutive=False) == [16, 16, 8, 8, 4]
    assert scales("xxx", hysteresis=1) == [8, 4, 2]
    assert scales("xxxxxxx", hysteresis=1, at_minimum="stay") == [8, 4, 2, 1, 1, 1, 1]


def params() -> Any:
    generator = torch.Generator().manual_seed(1)
    return {"a": integers(generator, (5, 4)), "b": integers(generator, (4,)), "c": torch.ones(2)}


def loss_fn(p: Any, b: Any) -> Tensor:
    return ((b["x"] @ p["a"] + p["b"]) ** 2).sum() * b["factor"]


def looking(p: Any, b: Any) -> Tensor:
    value = loss_fn(p, b)
    return value if float(value.detach()) > -math.inf else -value


def weighted(p: Any, b: Any) -> Any:
    return loss_fn(p, b), torch.tensor(float(b["x"].shape[0]))


def batch(rank: int, number: int, factor: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return {"x": integers(generator, (2 + rank, 5)), "factor": torch.tensor(factor).double()}


def train(mesh: zfunc.Mesh, loss: Any, accum: int, scale: Any) -> Any:
    step = zfunc.shard(loss, mesh, accum=accum, precision=Precision(loss_scale=scale))
    state = step.init(params(), optim.adamw(RATE))
    seen = []
    for number in range(3):
        rows = [batch(mesh.rank + 5 * micro, number) for micro in range(accum)]
        mine = rows if accum > 1 else rows[0]
        grads = gathered(step.value_and_grad(state.params, mine)[1])
        state, metrics = step(state, mine)
        seen += [*grads, metrics["loss"], metrics["grad_norm"], *gathered(state.params)]
    return seen, float(metrics["loss_scale"])


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("loss", [loss_fn, looking, weighted])
@pytest.mark.parametrize("accum", [1, 2])
def test_a_power_of_two_changes_no_bit(axes: Any, loss: Any, accum: int) -> None:
    plain = ranks(axes, train, loss, accum, None)
    for scale in (2.0**10, LossScale(initial_power=3, window=1)):
        for (seen, last), (wanted, _) in zip(
            ranks(axes, train, loss, accum, scale), plain, strict=True
        ):
            assert_equal(seen, wanted)
            assert last == (2.0**10 if isinstance(scale, float) else 2.0**4)


def test_a_loss_that_functorch_refuses_is_scaled_too() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        value = loss_fn(p, b)
        (inner,) = torch.autograd.grad(value, [p["b"]], create_graph=True)
        return value + inner.sum()

    (plain, _), (scaled, _) = (ranks(1, train, loss, 1, scale)[0] for scale in (None, 4.0))
    assert_equal(scaled, plain)


def test_small_gradients_survive_in_float16() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return (p["w"] * b).float().sum() * 2.0**-26

    def gradient(scale: float | None) -> Tensor:
        half = Precision(compute=torch.float16, reduce=torch.float32, loss_scale=scale)
        step = zfunc.shard(loss, zfunc.mesh(), precision=half)
        state = step.init({"w": torch.ones(3)}, optim.sgd(1.0))
        _, grads = step.value_and_grad(state.params, torch.ones(3, dtype=torch.float16))
        return zfunc.gather(grads)["w"]

    assert gradient(None).tolist() == [0.0] * 3, "too small for float16"
    assert gradient(2.0**20).tolist() == [2.0**-26] * 3


def overflowing(mesh: zfunc.Mesh, policy: LossScale, factors: list[list[float]]) -> Any:
    """Steps with given factors per step and rank; what each left behind."""
    half = dataclasses.replace(Precision.of("fp16"), batch=torch.float16, loss_scale=policy)
    tx = optim.adamw(schedules.linear(1.0, 0.0, 10))
    step = zfunc.shard(loss_fn, mesh, precision=half)
    state = step.init({"a": torch.ones(5, 4), "b": torch.zeros(4)}, tx)
    seen = []
    for number, row in enumerate(factors):
        before = bits((state.params, state.opt_state))
        state, metrics = step(state, batch(mesh.rank, number, row[mesh.rank]))
        after = bits((state.params, state.opt_state))
        same = all(a.equal(b) for a, b in zip(before, after, strict=True))
        row = (float(metrics["loss_scale"]), bool(metrics["skipped"]), same, float(metrics["lr"]))
        seen.append(row)
    return seen


def test_a_step_that_overflows_on_one_rank_is_left_out_on_all() -> None:
    policy = LossScale(initial_power=4, window=2, hysteresis=1)
    good, bad = [2.0**-10] * 2, [2.0**-10, 60000.0]
    one, other = ranks(2, overflowing, policy, [good, bad, good, bad, good, good, good])
    assert one == other
    scales, skipped, same, rates = zip(*one, strict=True)
    assert list(scales) == [16, 16, 8, 8, 4, 4, 4]
    assert list(skipped) == [False, True, False, True, False, False, False] == list(same)
    assert list(rates) == pytest.approx([1, 0.9, 0.9, 0.8, 0.8, 0.7, 0.6]), "of applied steps"


def test_the_minimum_is_an_error_that_leaves_the_state_valid() -> None:
    def run(mesh: zfunc.Mesh) -> Any:
        policy = LossScale(initial_power=1, hysteresis=1)
        half = dataclasses.replace(Precision.of("fp16"), batch=torch.float16, loss_scale=policy)
        step = zfunc.shard(loss_fn, mesh, precision=half)
        state = step.init({"a": torch.ones(5, 4), "b": torch.zeros(4)}, optim.sgd(RATE))
        bad = batch(mesh.rank, 0, 60000.0)
        state, _ = step(state, bad)
        with pytest.raises(zfunc.NonFiniteError, match="minimum of 1"):
            step(state, bad)
        state, metrics = step(state, batch(mesh.rank, 0, 2.0**-10))
        return int(state.step), bool(metrics["skipped"])

    assert ranks(2, run) == [(2, False)] * 2


def test_the_state_of_the_scale_is_a_value_like_the_rest() -> None:
    step = zfunc.shard(loss_fn, zfunc.mesh(), precision=Precision(loss_scale=LossScale(window=1)))
    plain = zfunc.shard(loss_fn, zfunc.mesh())
    state = step.init(params(), optim.sgd(RATE))
    for number in range(3):
        state, _ = step(state, batch(0, number))
    assert isinstance(state.scaler, Scaler) and float(state.scaler.scale) == 2.0**18
    again = pickle.loads(pickle.dumps(state))
    assert float(step(again, batch(0, 3))[1]["loss_scale"]) == 2.0**18
    with pytest.raises(zfunc.LayoutError, match=r"(?s)loss scale.*adopt"):
        plain(state, batch(0, 3))
    bare = plain.adopt(state)
    assert bare.scaler is None
    with pytest.raises(zfunc.LayoutError, match=r"(?s)loss scale.*adopt"):
        step(bare, batch(0, 3))
    fresh = step.adopt(bare)
    assert float(fresh.scaler.scale) == 2.0**16
    fresh, _ = step(fresh, batch(0, 3))
    assert step.adopt(fresh).scaler is fresh.scaler
    like = step.abstract(params(), optim.sgd(RATE))
    assert step.lower(like, batch(0, 0)).program.mode == "step"


def test_ranks_with_other_scales_are_told() -> None:
    def run(mesh: zfunc.Mesh) -> str:
        scale = 2.0 if mesh.rank else 4.0
        step = zfunc.shard(loss_fn, mesh, precision=Precision(loss_scale=scale))
        state = step.init(params(), optim.sgd(RATE))
        with pytest.raises(zfunc.ProgramMismatchError) as error:
            step(state, batch(mesh.rank, 0))
        return str(error.value)

    assert all("4.0" in text and "2.0" in text for text in ranks(2, run))


@pytest.mark.parametrize("nonfinite", ["raise", "ignore"])
def test_a_dynamic_scale_needs_steps_that_are_left_out(nonfinite: str) -> None:
    with pytest.raises(zfunc.LayoutError, match="'skip'"):
        zfunc.shard(loss_fn, zfunc.mesh(), precision="fp16", nonfinite=nonfinite)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Precision(loss_scale=0.0), "loss_scale"),
        (lambda: Precision(loss_scale=math.inf), "finite"),
        (lambda: Precision(loss_scale=True), "loss_scale"),
        (lambda: LossScale(window=0), "window"),
        (lambda: LossScale(hysteresis=0), "hysteresis"),
        (lambda: LossScale(minimum=-1.0), "minimum"),
        (lambda: LossScale(at_minimum="ignore"), "'raise' or 'stay'"),
    ],
)
def test_what_is_no_scale(make: Any, message: str) -> None:
    with pytest.raises(zfunc.LayoutError, match=message):
        make()


def test_scales_of_leaves_must_agree() -> None:
    rows = {"a": Precision(loss_scale=2.0), "b": Precision(), "c": None}
    with pytest.raises(zfunc.LayoutError, match="differs between leaves in loss_scale"):
        zfunc.shard(loss_fn, zfunc.mesh(), precision=rows)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_steps_left_out_in_a_row_are_told_with_leaf_and_rank(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(p: Any, b: Any) -> Tensor:
        bad = torch.where(b["bad"], torch.nan, 1.0)
        if what == "loss":
            return (p["a"] * b["x"]).sum() * bad
        return (p["a"] * b["x"]).sum() + (torch.sqrt(p["b"] * (1 - b["bad"].double()))).sum()

    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss, mesh)
        state = step.init(
            {"a": torch.ones(3).double(), "b": torch.ones(4).double()}, optim.sgd(RATE)
        )
        for bad in [True] * 3 + [False] + [True] * 8:
            here = torch.tensor(bad and mesh.rank == 1)
            state, metrics = step(state, {"x": torch.ones(3).double(), "bad": here})
            assert bool(metrics["skipped"]) == bad

    with caplog.at_level(logging.WARNING, "zfunc"):
        ranks(2, run)
    told = [record.getMessage() for record in caplog.records]
    assert ["step 7 is the 4th" in told[0], "step 11 is the 8th" in told[1]] == [True, True]
    assert len(told) == 2
    named = "the loss of rank 1" if what == "loss" else "the gradient of params['b']"
    assert all(named in text for text in told)
