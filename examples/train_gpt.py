"""Trains a byte-level GPT, sharded over all ranks, on the source files of Python's own library.

    torchrun --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py --data my_text.txt --steps 100

--batch is the global batch and the seed decides every number, so the loss curve is the same on any
number of ranks. In comments: B sequences, T bytes, D width, H heads, V = 256 values of a byte.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sysconfig
import time
import weakref
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads leave the cores to others

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

import zfunc
from zfunc import optim, random, report, schedules

V = 256


def init(key, args):
    """Draws the parameters; `step.init` keeps this rank's slice of each and drops the rest."""
    keys = iter(random.split(key, 1 + 4 * args.layers))
    D, dtype = args.width, getattr(torch, args.dtype)
    thin = 1 / math.sqrt(2 * args.layers)  # the residual stream is a sum of 2 * layers branches

    def matrix(rows, columns, scale=1.0):
        return random.normal(next(keys), (rows, columns), dtype) * (scale / math.sqrt(rows))

    embed = 0.02 * random.normal(next(keys), (V, D), dtype)  # also the output layer
    blocks = [
        {
            "norm_1": torch.ones(D, dtype=dtype),
            "qkv": matrix(D, 3 * D),
            "out": matrix(D, D, thin),
            "norm_2": torch.ones(D, dtype=dtype),
            "up": matrix(D, 4 * D),
            "down": matrix(4 * D, D, thin),
        }
        for _ in range(args.layers)
    ]
    return {"embed": embed, "blocks": blocks, "norm": torch.ones(D, dtype=dtype)}


def rotate(x, cos, sin):
    """Turns pairs of features of [B, H, T, D / H] by their place: products see distances only."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def block(p, x, cos, sin, heads):
    """One pre-norm block: [B, T, D] -> [B, T, D]."""
    B, T, D = x.shape
    qkv = F.layer_norm(x, (D,), p["norm_1"]) @ p["qkv"]  # [B, T, 3 D]
    q, k, v = (y.view(B, T, heads, D // heads).transpose(1, 2) for y in qkv.chunk(3, dim=-1))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, D / H]
    x = x + y.transpose(1, 2).reshape(B, T, D) @ p["out"]
    return x + F.gelu(F.layer_norm(x, (D,), p["norm_2"]) @ p["up"]) @ p["down"]


def logits(params, tokens, args):
    """Scores of the next byte: [B, T] -> [B, T, V]."""
    x = params["embed"][tokens]
    half, place = args.width // args.heads // 2, torch.arange(tokens.shape[1], dtype=x.dtype)
    angles = place[:, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    apply = zfunc.remat(block) if args.remat else block
    for p in params["blocks"]:
        x = apply(p, x, angles.cos(), angles.sin(), args.heads)
    return F.layer_norm(x, x.shape[-1:], params["norm"]) @ params["embed"].T


@torch.no_grad()
def sample(params, prompt, num_bytes, args, temperature=0.8):
    """Writes on, byte by byte, from whole parameters: no other rank takes part."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(num_bytes):
        scores = logits(params, tokens[:, -args.seq :], args)[:, -1] / temperature
        chosen = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def read_corpus(path, max_bytes=4_000_000):
    """Bytes to train on and bytes held out: every tenth file, or the last tenth of a single one."""
    root = Path(path or sysconfig.get_path("stdlib"))
    found = [root] if root.is_file() else sorted(root.rglob("*") if path else root.glob("*.py"))
    texts = [file.read_bytes() for file in found if file.is_file()]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        texts = [texts[0][cut:], texts[0][:cut]]
    train = b"".join(text for i, text in enumerate(texts) if i % 10)[:max_bytes]
    held_out = b"".join(texts[::10])[: max_bytes // 10]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)]


def windows(data, starts, length):
    """Cuts windows [number of starts, length] out of the data."""
    return data[starts[:, None] + torch.arange(length)].long()


def bigram_entropy(train, held_out):
    """Nats per byte given the byte before: of the training bytes, and of held-out windows.

    The first is the conditional entropy of the pairs counted: no model of pairs can do better on
    them. The second is what that model, with one added to each count, pays for held-out bytes.
    """
    pairs = train[:-1].long() * V + train[1:]
    counts = torch.bincount(pairs, minlength=V * V).view(V, V).double()
    own = torch.xlogy(counts, counts / counts.sum(1, keepdim=True).clamp(min=1))
    model = ((counts + 1) / (counts + 1).sum(1, keepdim=True)).log()
    paid = model[held_out[:, :-1], held_out[:, 1:]]
    return -(own.sum() / counts.sum()).item(), -paid.mean().item()


def train(args, mesh):
    """Trains; every rank calls it. Returns losses, what they compare with, and the last state."""
    length = args.seq + 1
    corpus, held_out = read_corpus(args.data)
    if args.batch % (mesh.size * args.accum):
        raise SystemExit(f"--batch must be a multiple of {mesh.size} ranks x {args.accum}")
    if min(len(corpus), len(held_out)) <= length:
        raise SystemExit(f"{args.data} is too short: {length} bytes make one sequence")
    starts = torch.linspace(0, len(held_out) - length, args.held_out)
    held_out = windows(held_out, starts.long(), length)
    # Without --live-bytes: two copies of the largest leaf, [D, 4 D], and some room for small ones.
    tight = (8 * args.width**2 + 500_000) * getattr(torch, args.dtype).itemsize
    budget = zfunc.Prefetch(live_bytes=int(args.live_bytes or tight))

    def loss_fn(params, batch):
        """The mean cross entropy of the next byte in nats; batch [B, T + 1]."""
        scores = logits(params, batch[:, :-1], args)
        return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    step = zfunc.shard(loss_fn, mesh, accum=args.accum, prefetch=budget)
    evaluate = zfunc.infer(loss_fn, mesh, prefetch=budget)
    rate = schedules.warmup_cosine(args.lr, args.steps // 20, args.steps, end_value=args.lr / 10)
    tx = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(rate, b2=0.99, weight_decay=0.1, mask=lambda path, shape: len(shape) > 1),
    )
    key = random.key(args.seed)
    state = step.init(lambda key: init(key, args), tx, key=key)

    def batch_of(number):
        """This rank's rows of the global batch of a step, in `accum` micro-batches."""
        starts = random.randint(random.fold_in(key, number), (args.batch,), 0, len(corpus) - length)
        rows = windows(corpus, starts, length).chunk(mesh.size)[mesh.rank]
        return list(rows.chunk(args.accum)) if args.accum > 1 else rows

    def held_out_loss(params):
        """Each rank evaluates its rows; the sum over ranks is the same on all of them."""
        rows = held_out.tensor_split(mesh.size)[mesh.rank]
        total = evaluate(params, rows) * len(rows)
        return zfunc.scatter(total, mesh, zfunc.P(), reduce="sum").local.item() / len(held_out)

    losses, evals, waited, seconds = [], {}, 0.0, 1e-9
    bar = tqdm(range(args.steps), unit="step", disable=mesh.rank > 0)
    for number in bar:
        if number % args.evaluate_every == 0:
            evals[number] = held_out_loss(state.params)
        batch, begun = batch_of(number), time.perf_counter()
        state, metrics = step(state, batch)  # the old state is consumed
        losses.append(metrics["loss"].item())
        if number:  # the first step captures and plans
            seconds += time.perf_counter() - begun
            waited += metrics["exposed_communication_s"].item()
        bar.set_postfix_str(
            f"loss {losses[-1]:.3f}, {number * args.batch * args.seq / seconds:.0f} tokens/s, "
            f"exposed communication {waited / seconds:.1%}"
        )
    evals[args.steps] = held_out_loss(state.params)
    bigram = bigram_entropy(corpus, held_out)
    return {"losses": losses, "held_out": evals, "bigram": bigram}, step, state, batch


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is entered, and their peak."""

    def __init__(self):
        super().__init__()
        self.seen, self.now, self.peak = weakref.WeakSet(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [] if func.is_view else zfunc.tree.leaves(out)
        for storage in (x.untyped_storage() for x in made if isinstance(x, torch.Tensor)):
            if storage not in self.seen:
                self.seen.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return out

    def add(self, nbytes):
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def table_of_bytes(plan, step, state, batch):
    """One rank's bytes: predicted by the plan, measured, and what it would need unsharded."""
    trees = state.params, step.value_and_grad(state.params, batch)[1], state.opt_state
    each = [[x.nbytes for x in zfunc.tree.leaves(t) if isinstance(x, torch.Tensor)] for t in trees]
    params, grads, opt = map(sum, each)
    with Allocated() as during_step:
        step(state, batch)
    total = params + opt + plan.inputs_bytes + plan.constants_bytes + during_step.peak
    whole = [plan.unsharded_params_bytes, plan.unsharded_grads_bytes, plan.unsharded_opt_bytes]
    acts, process = plan.peak_activation_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = [
        ("parameters", plan.params_bytes, params, whole[0]),
        ("gradients", plan.grads_bytes, grads, whole[1]),
        ("optimizer state", plan.opt_bytes, opt, whole[2]),
        ("live bytes, peak", plan.peak_live_bytes, None, None),
        ("activations, peak", acts, None, acts),
        ("all tensors, peak", plan.peak_total_bytes, total, sum(whole) + acts),
        ("process, peak", None, process * 1024, None),
    ]
    lines = [f"{'MB of one rank':<20}{'predicted':>11}{'measured':>11}{'unsharded':>11}"]
    for name, *cells in rows:
        texts = ["" if nbytes is None else f"{nbytes / 1e6:.3f}" for nbytes in cells]
        lines.append(f"{name:<20}{''.join(text.rjust(11) for text in texts)}")
    return "\n".join(lines)


def draw_losses(curves, path):
    """Draws the loss of each step, and of held-out bytes beside what pairs of bytes can do."""
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    axes.plot(curves["losses"], lw=0.7, label="batch")
    axes.plot(*zip(*curves["held_out"].items(), strict=True), "o-", label="held-out bytes")
    axes.axhline(min(curves["bigram"]), color="black", ls="--", lw=0.8, label="byte bigrams")
    axes.legend(frameon=False)
    figure.savefig(path)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, help="a file or folder of your own, instead of the library's source")
    add("--out", type=Path, default="out", help="folder for pictures")
    add("--steps", type=int, default=500)
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--seq", type=int, default=128, help="bytes per sequence")
    add("--batch", type=int, default=8, help="sequences per step, over all ranks")
    add("--accum", type=int, default=1, help="micro-batches per step")
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--dtype", choices=["float32", "float64"], default="float32")
    add("--live-bytes", type=float, help="budget for gathered copies and gradients on their way")
    add("--replica", type=int, default=1, help="size of the mesh axis that keeps whole copies")
    add("--shard", type=int, help="size of the mesh axis that cuts; by default all other ranks")
    add("--remat", action="store_true", help="compute blocks again in backward")
    add("--held-out", type=int, default=256, help="held-out sequences to evaluate on")
    add("--evaluate-every", type=int, default=125, help="steps")
    return parser.parse_args(arguments)


def main():
    args = parse()
    here, world = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    mesh = zfunc.mesh({"replica": args.replica, "shard": args.shard or world // args.replica})
    curves, step, state, batch = train(args, mesh)
    lowered, params = step.lower(state, batch), zfunc.gather(state.params)
    table = table_of_bytes(lowered.memory_analysis(), step, state, batch)
    if mesh.rank > 0:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    draw_losses(curves, args.out / "loss.png")
    report.program(lowered, args.out / "program.png")
    print(f"\n{sample(params, 'import ', 400, args)}\n\n{table}\n")
    loss, pairs = curves["held_out"][args.steps], curves["bigram"]
    print(f"held-out loss {loss:.3f} nats per byte, {min(pairs) - loss:.3f} below byte bigrams")
    print(
        f"(entropy of training pairs {pairs[0]:.3f}, their model on held-out bytes {pairs[1]:.3f})"
    )
    print(f"pictures in {args.out}/loss.png and {args.out}/program.png")


if __name__ == "__main__":
    main()
