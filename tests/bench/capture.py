"""How long a new signature takes (capture and passes), and a known one (lookup).

python tests/bench/capture.py [--layers 48]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch

import zfunc
from zfunc import optim
from zfunc.training import prepare

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpt import GPT, batch, loss_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = {"vocab": 256, "width": 64, "layers": options.layers, "heads": 4, "tokens": 32}
    with torch.device("meta"):
        template = GPT(**size)
    params = dict(GPT(**size).named_parameters())
    step = zfunc.shard(loss_of(template), zfunc.mesh())
    state = step.init(params, optim.adamw(1e-3))
    tokens = batch(0, 0, vocab=256, sequences=2, tokens=32)
    state, _ = step(state, tokens)
    (report,) = step.explain().signatures
    print(f"{options.layers} layers, {len(params)} leaves, {report.num_ops} ops")
    print(f"capture and passes  {report.capture_s:.2f} s")
    seconds = []
    for number in range(100):
        start = time.perf_counter()
        prepare(step._training, state.params, tokens, None, number, state=state)
        seconds.append(time.perf_counter() - start)
    print(f"a known signature   {statistics.median(seconds) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
