"""Every optimizer in sharded steps, against its paper on whole leaves, from oracle gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn

import zfunc
from tests.harness import assert_equal, bits, gathered, ranks
from tests.optim.papers import Adafactor, Adagrad, Lamb, Lion, Muon
from tests.oracle import Adamw, Oracle, Sgd
from tests.ranks import run_ranks
from zfunc import optim, schedules, tree

MESHES = [{"shard": 1}, {"shard": 2}, {"shard": 3}, {"shard": 4}, {"replica": 2, "shard": 2}]
SOME = [MESHES[0], MESHES[2], MESHES[4]]
SPECS = {"zero1": zfunc.zero(1), "zero3": zfunc.zero(3)}


@dataclasses.dataclass(frozen=True)
class ByLeaf:
    """A rule for the oracle that depends on the leaf."""

    rule_of: Callable[[Tensor], Any]

    def start(self, param: Tensor) -> Any:
        return self.rule_of(param).start(param)

    def apply(self, param: Tensor, grad: Tensor, memory: Any, decays: bool) -> Tensor:
        return self.rule_of(param).apply(param, grad, memory, decays)


RULES: dict[str, Any] = {
    "lion": (optim.lion(0.05, weight_decay=0.1), Lion(0.05, decay=0.1)),
    "adagrad": (optim.adagrad(0.1), Adagrad(0.1)),
    "lamb": (optim.lamb(0.05, weight_decay=0.1), Lamb(0.05, decay=0.1)),
    "lamb, bounded": (optim.lamb(0.05, max_coeff=0.25), Lamb(0.05, high=0.25)),
    "injected lamb": (optim.inject_hyperparams(optim.lamb)(0.05), Lamb(0.05)),
    "adafactor": (
        optim.adafactor(min_dim_size_to_factor=2, weight_decay_rate=0.1),
        Adafactor(lambda t: min(0.01, t**-0.5), least=2, decay=0.1),
    ),
    "adafactor, in full": (
        optim.adafactor(0.1, factored=False, clipping_threshold=0.5),
        Adafactor(lambda t: 0.1, least=99, threshold=0.5),
    ),
    "muon": (
        optim.muon(0.05, adam_b2=0.999, adam_weight_decay=0.1, ns_dtype=torch.float64),
        ByLeaf(lambda x: Muon(0.05, 0.1) if x.ndim == 2 else Adamw(0.05, weight_decay=0.1)),
    ),
}

TXS = [tx for tx, _ in RULES.values()]
PAPERS = [rule for _, rule in RULES.values()]


def params() -> Any:
    """Leaves that no world cuts evenly, a complex one, a frozen one, one that no loss reads."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    return {
        "b": draw(5),
        "count": torch.arange(3),
        "scale": draw(),
        "unread": draw(2, 2),
        "w": draw(3, 5),
        "z": draw(3, dtype=torch.complex128),
    }


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    h = torch.tanh(batch @ params["w"] + params["b"]) * params["scale"]
    return (h**2).mean() + (batch.to(torch.complex128) @ params["z"]).abs().square().mean()


def rows(world: int, step: int, micros: int = 1) -> list[list[Tensor]]:
    """`[rank][micro]` batches."""
    generator = torch.Generator().manual_seed(100 + step)
    draws = [[torch.randn(4, 3, generator=generator) for _ in range(micros)] for _ in range(world)]
    return [[batch.double() for batch in row] for row in draws]


@dataclasses.dataclass(frozen=True)
class Run:
    """The last state of a run, and the metrics and whole leaves after every step, on one rank."""

    state: Any
    metrics: list[Any]
    leaves: list[list[Tensor]]


def train(step: zfunc.Step, mesh: zfunc.Mesh, tx: Any, data: Any) -> Run:
    state, metrics, leaves = step.init(params(), tx), [], []
    for batches in data:
        own = batches[mesh.rank]
        state, told = step(state, own if len(own) > 1 else own[0])
        metrics.append(told)
        leaves.append(gathered(state.params))
    return Run(state, metrics, leaves)


def train_each(mesh: zfunc.Mesh, txs: list[Any], data: Any, options: Any) -> list[Run]:
    """One run for each transform, by one step, which captures once."""
    step = zfunc.shard(loss_fn, mesh, **options)
    return [train(step, mesh, tx, data) for tx in txs]


def train_apart(mesh: zfunc.Mesh, txs: list[Any], data: Any) -> list[Run]:
    """As `train_each`, in a process of its own: what it returns is sent."""
    return [dataclasses.replace(run, state=None) for run in train_each(mesh, txs, data, {})]


def compare(runs: list[list[Run]], rules: list[Any], data: Any, axes: Any, **options: Any) -> None:
    """Holds every rank's runs against the oracle's."""
    for number, rule in enumerate(rules):
        expected = oracle(rule, axes, **options)
        norms = [expected.step(batches).norm for batches in data]
        for run in (row[number] for row in runs):
            assert_equal(run.leaves[-1], expected.tensors, 1e-12)
            assert [float(m["grad_norm"]) for m in run.metrics] == pytest.approx(norms, rel=1e-12)


def oracle(rule: Any, axes: Any, **options: Any) -> Oracle:
    return Oracle(loss_fn, params(), rule, axes=axes, **options)


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sharded_steps_follow_the_papers(axes: Any, specs: str) -> None:
    data = [rows(math.prod(axes.values()), step) for step in range(3)]
    runs = ranks(axes, train_each, TXS, data, {"specs": SPECS[specs]})
    compare(runs, PAPERS, data, axes)


def test_ranks_that_gather_matrices_over_a_network() -> None:
    names = ["adafactor", "muon"]
    data = [rows(3, step) for step in range(3)]
    runs = run_ranks(3, train_apart, [RULES[name][0] for name in names], data)
    compare(runs, [RULES[name][1] for name in names], data, {"shard": 3})


@pytest.mark.parametrize("specs", SPECS)
def test_clipped_and_accumulated(specs: str) -> None:
    data = [rows(2, step, micros=3) for step in range(3)]
    txs = [optim.chain(optim.clip_by_global_norm(0.5), tx) for tx in TXS]
    runs = ranks(2, train_each, txs, data, {"specs": SPECS[specs], "accum": 3})
    compare(runs, PAPERS, data, {"shard": 2}, clip=0.5)


def test_frozen_leaves() -> None:
    data = [rows(3, step) for step in range(2)]
    trainable = {name: name != "w" for name in params()}
    runs = ranks(3, train_each, TXS, data, {"trainable": trainable})
    on = [name not in ("count", "w") for name in sorted(params())]
    compare(runs, PAPERS, data, {"shard": 3}, trainable=on)
    for run in (run for row in runs for run in row):
        assert not any("['w']" in path for path in tree.leaf_paths(run.state.opt_state))


def test_labels_and_masks() -> None:
    """Numbers take SGD, other leaves the rule; under the mask only the complex leaf has it."""
    data = [rows(3, step) for step in range(2)]

    def label(path: str, shape: tuple[int, ...]) -> str:
        return "big" if shape else "number"

    txs = [optim.partition({"big": tx, "number": optim.sgd(0.1)}, label) for tx in TXS]
    txs += [optim.masked(tx, {n: n == "z" for n in params()}) for tx in TXS]
    runs = ranks(3, train_each, txs, data, {})
    for number, rule in enumerate(PAPERS):
        mixed = ByLeaf(lambda x, rule=rule: rule if x.ndim else Sgd(0.1))
        alone = ByLeaf(lambda x, rule=rule: rule if x.is_complex() else Sgd(-1.0))
        compare([row[number : number + 1] for row in runs], [mixed], data, {"shard": 3})
        offset = number + len(PAPERS)
        compare([row[offset : offset + 1] for row in runs], [alone], data, {"shard": 3})


@pytest.mark.parametrize("specs", SPECS)
def test_a_skip_leaves_every_bit(specs: str) -> None:
    txs = [
        *TXS,
        optim.multi_steps(optim.adamw(0.1), 3),
        optim.chain(optim.ema(0.5), optim.sgd(0.1)),
        optim.chain(optim.adamw(0.1), optim.ema_params(0.5)),
    ]
    good, bad = rows(2, 0), rows(2, 1)
    bad[1][0][0, 0] = math.nan

    def run(mesh: zfunc.Mesh) -> None:
        step = zfunc.shard(loss_fn, mesh, specs=SPECS[specs])
        for tx in txs:
            state, _ = step(step.init(params(), tx), good[mesh.rank][0])
            before = bits((state.params, state.opt_state))
            state, metrics = step(state, bad[mesh.rank][0])
            assert int(metrics["skipped"]) == 1
            assert_equal(bits((state.params, state.opt_state)), before)

    ranks(2, run)


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("axes", SOME, ids=str)
def test_several_calls_are_the_micro_batches_of_one(axes: Any, specs: str) -> None:
    """With a step that is skipped in the middle of a window."""
    world = math.prod(axes.values())
    calls = [rows(world, step) for step in range(6)]
    bad = rows(world, 9)
    bad[-1][0][0, 0] = math.inf
    rate = schedules.linear(0.1, 0.0, 4)
    clip = optim.clip_by_global_norm(0.5)
    tx = optim.multi_steps(optim.chain(clip, optim.adamw(rate)), 3)
    expected = oracle(Adamw(rate), axes, clip=0.5)
    for window in (calls[:3], calls[3:]):
        expected.step([[call[rank][0] for call in window] for rank in range(world)])
    data = [*calls[:2], bad, *calls[2:]]
    start = [x for x in tree.leaves(params()) if isinstance(x, Tensor)]
    for (run,) in ranks(axes, train_each, [tx], data, {"specs": SPECS[specs]}):
        for early in run.leaves[:3]:
            assert_equal(early, start)
        for late in run.leaves[4:6]:
            assert_equal(late, run.leaves[3])
        assert_equal(run.leaves[-1], expected.tensors, 1e-12)
        assert [float(m["lr"]) for m in run.metrics] == pytest.approx([0.1] * 4 + [0.075] * 3)


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("axes", SOME, ids=str)
def test_averages_over_ranks(axes: Any, specs: str) -> None:
    data = [rows(math.prod(axes.values()), step) for step in range(4)]
    expected = oracle(Adamw(0.1), axes)
    follow = get_ema_avg_fn(0.75)
    mean = [x for x in expected.tensors if x.dtype != torch.int64]
    for batches in data:
        expected.step(batches)
        now = [x for x in expected.tensors if x.dtype != torch.int64]
        mean = [follow(old, new, 0) for old, new in zip(mean, now, strict=True)]
    tx = optim.chain(optim.adamw(0.1), optim.ema_params(0.75))

    def run(mesh: zfunc.Mesh) -> tuple[list[Tensor], list[Tensor], Tensor]:
        (done,) = train_each(mesh, [tx], data, {"specs": SPECS[specs]})
        means = done.state.opt_state[-1].ema
        loss = zfunc.infer(loss_fn, mesh)(means | {"count": None}, data[0][0][0])
        return done.leaves[-1], gathered(means), loss

    for after, averaged, loss in ranks(axes, run):
        assert_equal(after, expected.tensors, 1e-12)
        assert_equal(averaged, mean, 1e-12)
        names = [name for name in sorted(params()) if name != "count"]
        whole = dict(zip(names, averaged, strict=True))
        assert_equal([loss], [loss_fn(whole, data[0][0][0])], 1e-12)


def test_numbers_set_between_steps_need_no_capture() -> None:
    data = [rows(2, step) for step in range(4)]
    rates = [0.05, 0.05, 0.01, 0.2]
    expected = oracle(Lamb(0.0), {"shard": 2})
    for batches, rate in zip(data, rates, strict=True):
        expected._tx = Lamb(rate)
        expected.step(batches)

    def run(mesh: zfunc.Mesh) -> list[Tensor]:
        step = zfunc.shard(loss_fn, mesh)
        state = step.init(params(), optim.inject_hyperparams(optim.lamb)(rates[0]))
        for batches, rate in zip(data, rates, strict=True):
            state = optim.set_hyperparams(state, learning_rate=rate)
            state, metrics = step(state, batches[mesh.rank][0])
            assert float(metrics["lr"]) == rate
        explained = step.explain()
        assert (explained.misses, explained.hits) == (1, 3)
        return gathered(state.params)

    for after in ranks(2, run):
        assert_equal(after, expected.tensors, 1e-12)


def test_adopt_keeps_numbers_and_starts_averages_of_newly_trained_leaves() -> None:
    tx = optim.chain(optim.inject_hyperparams(optim.lion)(0.5), optim.ema_params(0.5))

    def run(mesh: zfunc.Mesh) -> None:
        part = zfunc.shard(loss_fn, mesh, trainable={n: n != "w" for n in params()})
        state, _ = part(part.init(params(), tx), rows(2, 0)[mesh.rank][0])
        state = optim.set_hyperparams(state, learning_rate=0.25)
        means = gathered(state.opt_state[-1].ema)
        state = zfunc.shard(loss_fn, mesh, specs=zfunc.zero(1)).adopt(state)
        assert optim.learning_rate_of(tx, state.opt_state) == 0.25
        after = zfunc.gather(state.opt_state[-1].ema)
        assert_equal([after.pop("w")], [params()["w"]])
        assert_equal([x for x in tree.leaves(after)], means)

    ranks(2, run)
