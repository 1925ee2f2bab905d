"""A frozen vision encoder and a frozen language model, joined by a trained projector.

    torchrun --nproc-per-node 2 examples/multimodal_frozen.py

The images are the 8 x 8 digits of scikit-learn. First the encoder learns to tell them apart without
any text, and the language model learns "7 is seven." without images. Then both are frozen, and only
a matrix is trained: it must put into the place of the first byte what the encoder sees. Every third
batch of a rank is text alone, so ranks run programs that differ, and need not know of it.
In comments: B samples, T bytes, D width, F features, V = 256 values of a byte.
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
from train_gpt import block
from train_gpt import init as init_language_model

import zfunc
from zfunc import optim, random

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LINES = [f"{digit} is {word}.\n" for digit, word in enumerate(WORDS)]
LENGTH = max(map(len, LINES))
TEXT = torch.tensor([list(line.ljust(LENGTH).encode()) for line in LINES])  # [10, T]


def init_encoder(key, features):
    keys = random.split(key, 3)
    return {
        "in": random.normal(keys[0], (64, 4 * features)) / 8,
        "out": random.normal(keys[1], (4 * features, features)) / (4 * features) ** 0.5,
        "head": random.normal(keys[2], (features, 10)) / features**0.5,
    }


def encode(p, images):
    """What the encoder sees: [B, 64] -> [B, F]."""
    return torch.tanh(torch.relu(images @ p["in"]) @ p["out"])


def read(p, x, args):
    """The scores of each next byte, from the vectors so far: [B, T, D] -> [B, T, V]."""
    half, place = args.width // args.heads // 2, torch.arange(x.shape[1], dtype=x.dtype)
    angles = place[:, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    for q in p["blocks"]:
        x = block(q, x, angles.cos(), angles.sin(), args.heads)
    return F.layer_norm(x, x.shape[-1:], p["norm"]) @ p["embed"].T


def begin(params, images):
    """The first vector of a line, in the place of its digit: [B, 64] -> [B, 1, D]."""
    return (encode(params["encoder"], images) @ params["projector"])[:, None]


def loss_of(args):
    def loss_fn(params, batch):
        """The cross entropy of all bytes but the first; the projector learns from images alone."""
        model, text = params["language_model"], batch["text"]
        first = begin(params, batch["images"]) if "images" in batch else model["embed"][text[:, :1]]
        x = torch.cat([first, model["embed"][text[:, 1:-1]]], dim=1)
        return F.cross_entropy(read(model, x, args).flatten(0, 1), text[:, 1:].flatten())

    return loss_fn


def fit(step, state, batches, name, quiet):
    """Runs a step over batches; returns the last state and every loss (their mean over ranks)."""
    losses = []
    bar = tqdm(batches, desc=name, unit="step", disable=quiet)
    for batch in bar:
        state, metrics = step(state, batch)  # the old state is consumed
        losses.append(metrics["loss"].item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    return state, losses


def train(args, mesh):
    """The three trainings; every rank calls it. Returns whole parameters and what to show."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1  # [1797, 64]
    names = torch.tensor(digits.target)
    held_out = torch.arange(len(images)) % 5 == 0
    shown, labels = images[~held_out], names[~held_out]
    quiet, key, tx = mesh.rank > 0, random.key(args.seed), optim.adamw(args.lr)

    def rows(number):
        """This rank's rows of a batch, of the training images."""
        drawn = random.randint(random.fold_in(key, number), (args.batch,), 0, len(shown))
        return drawn.chunk(mesh.size)[mesh.rank]

    def see(p, batch):
        return F.cross_entropy(encode(p, batch[0]) @ p["head"], batch[1])

    steps = range(args.pretrain)
    seeing = zfunc.shard(see, mesh)
    state = seeing.init(lambda key: init_encoder(key, args.features), tx, key=key)
    batches = ((shown[rows(n)], labels[rows(n)]) for n in steps)
    state, _ = fit(seeing, state, batches, "vision encoder", quiet)
    encoder = zfunc.gather(state.params)

    def tell(p, text):
        scores = read(p, p["embed"][text[:, :-1]], args)
        return F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())

    speaking = zfunc.shard(tell, mesh)
    state = speaking.init(lambda key: init_language_model(key, args), tx, key=key)
    state, _ = fit(speaking, state, (TEXT for _ in steps), "language model", quiet)
    params = {
        "encoder": encoder,
        "language_model": zfunc.gather(state.params),
        "projector": 0.02 * random.normal(key, (args.features, args.width)),
    }

    frozen = {"encoder": False, "language_model": False, "projector": True}
    joined = zfunc.shard(loss_of(args), mesh, trainable=frozen)

    def batch(number):
        chosen = rows(args.pretrain + number)
        text = {"text": TEXT[labels[chosen]]}
        return text if (number + mesh.rank) % 3 == 2 else text | {"images": shown[chosen]}

    state, losses = fit(
        joined, joined.init(params, tx), map(batch, range(args.steps)), "projector", quiet
    )
    after = zfunc.gather(state.params)
    wanted = [WORDS[n] for n in names[held_out].tolist()]
    said = speak(after, images[held_out], args)
    right = [one == other for one, other in zip(said, wanted, strict=True)]
    return {
        "before": params,
        "params": after,
        "state_bytes": sum(
            x.nbytes for x in zfunc.tree.leaves(state.opt_state) if isinstance(x, torch.Tensor)
        ),
        "losses": losses,
        "accuracy": sum(right) / len(right),
        "examples": images[held_out][::44][:8],
    }


@torch.no_grad()
def speak(params, images, args):
    """What the model says of each image, byte by byte, from whole parameters."""
    embed = params["language_model"]["embed"]
    x, said = begin(params, images), []
    for _ in range(LENGTH - 1):
        said.append(read(params["language_model"], x, args)[:, -1].argmax(-1))
        x = torch.cat([x, embed[said[-1]][:, None]], dim=1)
    lines = torch.stack(said, 1).tolist()
    return [bytes(line).decode(errors="replace").strip().removeprefix("is ")[:-1] for line in lines]


def draw(told, spoken, path):
    """Draws the loss, and some held-out images with what was said of them."""
    figure = Figure(figsize=(9, 3), dpi=150, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 2])
    axes = left.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    axes.plot(told["losses"])
    for i, (image, word) in enumerate(zip(told["examples"], spoken, strict=True)):
        one = right.add_subplot(2, 4, i + 1)
        one.imshow(image.view(8, 8).tolist(), cmap="gray_r")
        one.set_title(word, fontsize=9)
        one.axis("off")
    figure.savefig(path)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default="out", help="folder for the picture")
    add("--pretrain", type=int, default=200, help="steps of the encoder and the language model")
    add("--steps", type=int, default=200, help="steps of the projector")
    add("--batch", type=int, default=64, help="samples per step, over all ranks")
    add("--features", type=int, default=32)
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=2)
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    args.dtype = "float32"
    return args


def main():
    args = parse()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    mesh = zfunc.mesh()
    told = train(args, mesh)
    if mesh.rank > 0:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    spoken = speak(told["params"], told["examples"], args)
    draw(told, spoken, args.out / "multimodal_frozen.png")
    print(f"\nsaid of held-out images: {', '.join(spoken)}")
    print(
        f"optimizer state of one rank: {told['state_bytes'] / 1e3:.1f} kB, of the projector alone"
    )
    print(f"held-out images named right: {told['accuracy']:.1%}")


if __name__ == "__main__":
    main()
