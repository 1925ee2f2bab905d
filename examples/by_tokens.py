"""Batches by tokens beside padding to the longest: the functions of Python's own library.

    torchrun --nproc-per-node 2 examples/by_tokens.py
    python examples/by_tokens.py --tokens 8192 --buckets 6

Each sample is the source of one function, so lengths are spread as they are in life. Both ways
train the model of train_gpt.py from the same start, in turns, on padded batches of the same size;
what is compared is real tokens per second, the median over the turns.
"""

from __future__ import annotations

import argparse
import ast
import os
import statistics
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads leave the cores to others

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tqdm import tqdm
from train_gpt import init, logits

import zfunc
from zfunc import data, optim, random, schedules


def read_functions(count, longest):
    """The bytes of functions, in order of files and lines, each a tensor [tokens + 1]."""
    samples = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_bytes()
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = b"".join(lines[node.lineno - 1 : node.end_lineno])
                if 2 <= len(text) <= longest + 1:
                    samples.append(torch.frombuffer(bytearray(text), dtype=torch.uint8).long())
        if len(samples) >= count:
            return samples[:count]
    return samples


def loss_of(args):
    def loss_fn(params, batch):
        """The summed cross entropy of real tokens, and their number, which is the weight."""
        rows, real = batch  # [B, T + 1] each
        scores = logits(params, rows[:, :-1], args).flatten(0, 1)
        each = F.cross_entropy(scores, rows[:, 1:].flatten(), reduction="none")
        weight = real[:, 1:].flatten().to(each.dtype)  # padding is at the end of a row
        return (each * weight).sum(), weight.sum()

    return loss_fn


class Way:
    """One way to make batches: a plan, a step, and what it has trained so far."""

    def __init__(self, name, plan, samples, args, mesh):
        self.name, self.plan, self.samples = name, plan, samples
        sizes = plan.tokens()
        rate = schedules.by_batch(args.lr, sizes, statistics.median_high(sizes), "sqrt")
        self.step = zfunc.shard(loss_of(args), mesh)
        self.tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate))
        self.state, self.position, self.losses, self.rates = None, 0, [], []
        self.start = lambda: self.step.init(
            lambda key: init(key, args), self.tx, key=random.key(args.seed)
        )

    def warm_up(self):
        """Captures the loss once for each shape of batch, on a state that is thrown away."""
        state = self.start()
        for batch in {(batch.rows, batch.length): batch for batch in self.plan}.values():
            state, _ = self.step(state, self.batch(batch))
        self.state = self.start()

    def batch(self, batch):
        return data.pad(batch, [self.samples[i] for i in batch.indices], like=self.samples[0])

    def turn(self, steps):
        """Trains on; notes the real tokens per second of all ranks."""
        tokens, begun = 0, time.perf_counter()
        for batch in self.plan[self.position : self.position + steps]:
            self.state, metrics = self.step(self.state, self.batch(batch))
            self.losses.append(metrics["loss"].item())
        tokens = sum(self.plan[self.position : self.position + steps].tokens())
        self.position += steps
        self.rates.append(tokens / (time.perf_counter() - begun))


def compare(args, mesh):
    """Trains both ways in turns; every rank calls it."""
    samples = read_functions(args.samples, args.longest)
    lengths = [len(x) for x in samples]
    ways = []
    for name, buckets in {"by tokens": args.buckets, "to the longest": 1}.items():
        key = random.key(args.seed)
        plan = data.by_tokens(lengths, args.tokens, mesh=mesh, key=key, buckets=buckets)
        ways.append(Way(name, plan, samples, args, mesh))
    for way in tqdm(ways, desc="captures", disable=mesh.rank > 0):
        way.warm_up()
    for _ in tqdm(range(args.turns), unit="turn", disable=mesh.rank > 0):
        for way in ways:
            way.turn(args.steps)
    return lengths, ways


def draw(lengths, ways, path):
    """Draws how lengths are spread, the padded lengths, and the tokens per second."""
    figure = Figure(figsize=(9, 3.5), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    left.hist(lengths, bins=60, color="tab:blue", alpha=0.6)
    left.set(xlabel="tokens of a sample", ylabel="samples")
    for length in sorted({length for _, length in ways[0].plan.shapes()}):
        left.axvline(length, color="black", lw=0.8, ls="--")
    right.bar([way.name for way in ways], [statistics.median(way.rates) for way in ways])
    right.set(ylabel="real tokens / s")
    figure.savefig(path)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default="out", help="folder for the picture")
    add("--samples", type=int, default=6000)
    add("--longest", type=int, default=1024, help="longer functions are left out")
    add("--tokens", type=int, default=4096, help="padded tokens of one batch of one rank")
    add("--buckets", type=int, default=8, help="padded lengths")
    add("--turns", type=int, default=5)
    add("--steps", type=int, default=6, help="steps of a turn")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    args.dtype, args.remat = "float32", False
    return args


def main():
    args = parse()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    mesh = zfunc.mesh()
    lengths, ways = compare(args, mesh)
    if mesh.rank > 0:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    draw(lengths, ways, args.out / "by_tokens.png")
    middle = statistics.median(lengths)
    print(f"\n{len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens, median {middle}")
    for way in ways:
        print(
            f"{way.name:<15}{statistics.median(way.rates):>9.0f} tokens/s, padding "
            f"{way.plan.padding():.0%}, {way.step.explain().misses} captures, "
            f"loss {way.losses[0]:.2f} -> {way.losses[-1]:.2f}"
        )
    ratio = statistics.median(ways[0].rates) / statistics.median(ways[1].rates)
    print(f"by tokens: {ratio:.2f} times the tokens per second")


if __name__ == "__main__":
    main()
