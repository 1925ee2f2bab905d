"""A Hugging Face GPT-2 through `zfunc.module` beside the same model written as a function.

The library's own spelling of gelu ("gelu_new", a dozen operators) gives way to torch's, which
computes the same. Both train on the same batches from the same weights, in turns in one process of
one thread, so a drift of the machine meets both. Losses are compared, step times are medians.

    python tests/bench/modules.py [--layers 12] [--width 256] [--turns 5] [--steps 4]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import zfunc
from zfunc import optim

VOCABULARY, LENGTH, HEADS, BATCH = 2048, 256, 4, 2


def by_hand(params: Any, ids: Tensor, layers: int) -> Tensor:
    """The loss of GPT-2 (Radford et al. 2019), from the leaves by their names in the library."""
    p = {name.removeprefix("transformer."): x for name, x in params["params"].items()}

    def dense(name: str, x: Tensor) -> Tensor:
        return torch.addmm(p[f"{name}.bias"], x.flatten(0, 1), p[f"{name}.weight"]).view(
            *x.shape[:2], -1
        )

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])

    x = p["wte.weight"][ids] + p["wpe.weight"][: ids.shape[1]]
    for i in range(layers):
        qkv = dense(f"h.{i}.attn.c_attn", norm(f"h.{i}.ln_1", x))
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in qkv.chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + dense(f"h.{i}.attn.c_proj", y)
        y = F.gelu(dense(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x)), approximate="tanh")
        x = x + dense(f"h.{i}.mlp.c_proj", y)
    logits = norm("ln_f", x) @ p["wte.weight"].T
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=options.width, n_layer=options.layers,
        n_head=HEADS, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    apply_fn, params = zfunc.module(GPT2LMHeadModel(config))
    losses = {
        "zfunc.module": lambda p, ids: apply_fn(p, input_ids=ids, labels=ids).loss,
        "by hand": lambda p, ids: by_hand(p, ids, options.layers),
    }
    tx, generator = optim.adamw(1e-3), torch.Generator().manual_seed(0)
    steps = {name: zfunc.shard(loss, zfunc.mesh()) for name, loss in losses.items()}
    states = {name: step.init(params, tx) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    worst = 0.0
    for turn in range(options.turns + 1):  # the first turn captures
        batches = torch.randint(0, VOCABULARY, (options.steps, BATCH, LENGTH), generator=generator)
        told: dict[str, list[float]] = {}
        for name, step in steps.items():
            for ids in batches:
                begun = time.perf_counter()
                states[name], metrics = step(states[name], ids)
                told.setdefault(name, []).append(float(metrics["loss"]))
                if turn:
                    seconds[name].append(time.perf_counter() - begun)
        first, second = told.values()
        worst = max(worst, *(abs(a - b) for a, b in zip(first, second, strict=True)))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:13s} {median:.3f} s a step")
    ratio = medians["zfunc.module"] / medians["by hand"]
    print(f"ratio {ratio:.3f}; the largest difference of a loss {worst:.1e}")


if __name__ == "__main__":
    main()
