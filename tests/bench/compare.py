"""zfunc beside DDP, FSDP2 and DeepSpeed: the same GPT and batches, 2 gloo ranks of 1 thread each.

Each round runs every system once, in processes of their own, so that a drift of the machine meets
all alike. Step times are medians over the steps of all rounds; losses are compared with DDP's.
DeepSpeed (ZeRO-3, its CPU optimizer) needs the `bench` extra and a C++ compiler.

    python tests/bench/compare.py [--rounds 3] [--steps 10] [--dtype fp32|bf16]
        [--systems zfunc,ddp,fsdp2,deepspeed]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpt import GPT, batch, loss_of

SYSTEMS = ("zfunc", "ddp", "fsdp2")
RATE, DECAY = 1e-3, 1e-2
Step = Callable[[int], float]


def zfunc_step(rank: int, dtype: str, live_bytes: int | None) -> Step:
    import zfunc
    from zfunc import optim

    mesh = zfunc.mesh()
    module = GPT()
    params = dict(module.named_parameters())
    with torch.device("meta"):
        template = GPT()
    precision = None if dtype == "fp32" else dtype
    budget = zfunc.Prefetch(live_bytes=live_bytes)
    step = zfunc.shard(loss_of(template), mesh, precision=precision, prefetch=budget)
    box = [step.init(params, optim.adamw(RATE, weight_decay=DECAY))]
    del module, params

    def run(number: int) -> float:
        box[0], metrics = step(box[0], batch(number, rank))
        return float(metrics["loss"])

    return run


def ddp_step(rank: int, dtype: str, live_bytes: int | None) -> Step:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(GPT())
    return _torch_step(model, rank, autocast=dtype == "bf16")


def fsdp2_step(rank: int, dtype: str, live_bytes: int | None) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    model = GPT()
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    policy = mixed if dtype == "bf16" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=dataclasses.replace(policy, output_dtype=None))
    fully_shard(model, mp_policy=policy)
    return _torch_step(model, rank)


def deepspeed_step(rank: int, dtype: str, live_bytes: int | None) -> Step:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
    }
    engine, *_ = deepspeed.initialize(model=GPT(), config=settings)

    def run(number: int) -> float:
        loss = engine(batch(number, rank))
        engine.backward(loss)
        engine.step()
        return _mean(loss)

    return run


def _mean(loss: torch.Tensor) -> float:
    total = loss.detach().float()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _torch_step(model: torch.nn.Module, rank: int, *, autocast: bool = False) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def run(number: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch(number, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return _mean(loss)

    return run


def worker(system: str, steps: int, dtype: str, live_bytes: int | None) -> None:
    """Runs one system on this rank; rank 0 prints what it measured."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    run = MAKERS[system](rank, dtype, live_bytes)
    losses, seconds = [], []
    for number in range(steps + 2):
        start = time.perf_counter()
        losses.append(run(number))
        if number >= 2:
            seconds.append(time.perf_counter() - start)
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"losses": losses, "seconds": seconds, "peak_bytes": int(peak)}))
    dist.destroy_process_group()


MAKERS = {
    "zfunc": zfunc_step,
    "ddp": ddp_step,
    "fsdp2": fsdp2_step,
    "deepspeed": deepspeed_step,
}


def launch(system: str, options: argparse.Namespace) -> dict:
    """Runs one system in new processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [os.path.abspath(__file__), "--worker", system, "--steps", str(options.steps)]
    command += ["--dtype", options.dtype]
    if options.live_bytes is not None:
        command += ["--live-bytes", str(options.live_bytes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{system} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--live-bytes", type=int)
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.steps, options.dtype, options.live_bytes)
        return
    runs: dict[str, list[dict]] = {name: [] for name in options.systems.split(",")}
    for _ in range(options.rounds):
        for name, done in runs.items():
            done.append(launch(name, options))
    medians = {n: statistics.median(s for r in d for s in r["seconds"]) for n, d in runs.items()}
    peaks = {n: statistics.median(r["peak_bytes"] for r in d) for n, d in runs.items()}
    reference = runs["ddp" if "ddp" in runs else next(iter(runs))][0]["losses"]
    base = "fsdp2" if "fsdp2" in runs else next(iter(runs))
    against = f"/ {base}"
    print(f"{'':8s} {'step s':>8s} {against:>8s} {'RSS GB':>8s} {against:>8s}  loss difference")
    for name, done in runs.items():
        worst = max(abs(a - b) for r in done for a, b in zip(r["losses"], reference, strict=True))
        print(
            f"{name:8s} {medians[name]:8.3f} {medians[name] / medians[base]:8.3f}"
            f" {peaks[name] / 1e9:8.3f} {peaks[name] / peaks[base]:8.3f}  {worst:.2e}"
        )


if __name__ == "__main__":
    main()
