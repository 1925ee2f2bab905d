"""Trains a classifier as it will be packed: quantised to few bits, pruned, or both.

    torchrun --nproc-per-node 2 examples/compress_digits.py
    python examples/compress_digits.py --steps 400

The 8 x 8 digits of scikit-learn. Every way starts from the same weights and sees the same batches;
what is printed is the accuracy of the unpacked result on held-out images, and its bytes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads leave the cores to others

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tqdm import tqdm

import zfunc
from zfunc import compress, optim, random, schedules
from zfunc.compress import FakeQuantise, Magnitude, Movement, Rows

WAYS = {
    "whole": {},
    "8 bits": {"w*": FakeQuantise(8)},
    "4 bits": {"w*": FakeQuantise(4, 32)},
    "3 bits": {"w*": FakeQuantise(3, 32)},
    "a tenth, by magnitude": {"w*": Magnitude()},
    "a tenth, by movement": {"w*": Movement()},
    "a tenth, 4 bits": {"w*": (Magnitude(), FakeQuantise(4, 32))},
    "a quarter of the units": {"w1": Rows(0.25, dim=1)},
}


def init(key, args):
    keys = random.split(key, 3)
    sizes = [(64, args.width), (args.width, args.width), (args.width, 10)]
    params = {"b1": torch.zeros(args.width), "b2": torch.zeros(args.width), "b3": torch.zeros(10)}
    for i, (rows, columns) in enumerate(sizes):
        params[f"w{i + 1}"] = random.normal(keys[i], (rows, columns)) * (2 / rows) ** 0.5
    return {"params": params, "scores": zfunc.tree.map(torch.zeros_like, params)}


def classify(p, images):
    """[B, 64] -> [B, 10]."""
    h = torch.relu(images @ p["w1"] + p["b1"])
    return torch.relu(h @ p["w2"] + p["b2"]) @ p["w3"] + p["b3"]


def train(args, mesh):
    """Trains every way; every rank calls it. Returns accuracy and bytes by way."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1  # [1797, 64]
    labels = torch.tensor(digits.target)
    held_out = random.permutation(random.key(1), len(images)) < 360
    key, told = random.key(args.seed), {}
    shown = images[~held_out], labels[~held_out]
    keep = schedules.polynomial(1.0, 0.1, 3, args.steps * 2 // 3)

    def batch_of(number):
        """This rank's rows of a batch, and the part of the weights that is kept by now."""
        drawn = random.randint(random.fold_in(key, number), (args.batch,), 0, len(shown[0]))
        rows = drawn.chunk(mesh.size)[mesh.rank]
        return shown[0][rows], shown[1][rows], torch.tensor(keep(number))

    for name, rules in WAYS.items():

        def loss_fn(p, batch, rules=rules):
            images, labels, keep = batch
            used = compress.transform(p["params"], rules, keep=keep, scores=p["scores"])
            return F.cross_entropy(classify(used, images), labels)

        step = zfunc.shard(loss_fn, mesh)
        rate = schedules.cosine(args.lr, args.steps)
        state = step.init(lambda key: init(key, args), optim.adam(rate), key=key)
        bar = tqdm(range(args.steps), desc=name, unit="step", disable=mesh.rank > 0)
        for number in bar:
            state, metrics = step(state, batch_of(number))  # the old state is consumed
            if number % 20 == 0:
                bar.set_postfix_str(f"loss {metrics['loss'].item():.3f}")
        whole = zfunc.gather(state.params)
        last = keep(args.steps)
        packed = compress.pack(whole["params"], rules, keep=last, scores=whole["scores"])
        found = classify(compress.unpack(packed), images[held_out]).argmax(1)
        nbytes = sum(x.nbytes for x in zfunc.tree.leaves(packed) if isinstance(x, torch.Tensor))
        told[name] = ((found == labels[held_out]).double().mean().item(), nbytes)
    return told


def draw(told, path):
    """Draws accuracy over bytes."""
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot(xlabel="kB", ylabel="held-out accuracy", xscale="log")
    for name, (accuracy, nbytes) in told.items():
        axes.plot(nbytes / 1e3, accuracy, "o", label=name)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default="out", help="folder for the picture")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=64, help="samples per step, over all ranks")
    add("--width", type=int, default=128)
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main():
    args = parse()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    mesh = zfunc.mesh()
    told = train(args, mesh)
    if mesh.rank > 0:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    draw(told, args.out / "compress_digits.png")
    print(f"\n{'':<24}{'accuracy':>10}{'kB':>8}")
    for name, (accuracy, nbytes) in told.items():
        print(f"{name:<24}{accuracy:>10.1%}{nbytes / 1e3:>8.1f}")


if __name__ == "__main__":
    main()
