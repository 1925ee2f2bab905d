"""zfunc beside DDP and FSDP2: the same GPT, the same batches, 2 gloo ranks of 1 thread each.

Each round runs every system once, in processes of their own, so that a drift of the machine meets
all alike. Step times are medians over the steps of all rounds; losses are compared with DDP's.

    python tests/bench/compare.py [--rounds 3] [--steps 10] [--systems zfunc,ddp,fsdp2]
"""

from __future__ import annotations

import argparse
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


def zfunc_step(rank: int, live_bytes: int | None) -> Step:
    import zfunc
    from zfunc import optim

    mesh = zfunc.mesh()
    module = GPT()
    params = dict(module.named_parameters())
    with torch.device("meta"):
        template = GPT()
    step = zfunc.shard(loss_of(template), mesh, prefetch=zfunc.Prefetch(live_bytes=live_bytes))
    box = [step.init(params, optim.adamw(RATE, weight_decay=DECAY))]
    del module, params

    def run(number: int) -> float:
        box[0], metrics = step(box[0], batch(number, rank))
        return float(metrics["loss"])

    return run


def ddp_step(rank: int, live_bytes: int | None) -> Step:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(GPT())
    return _torch_step(model, rank)


def fsdp2_step(rank: int, live_bytes: int | None) -> Step:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _torch_step(model, rank)


def _torch_step(model: torch.nn.Module, rank: int) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def run(number: int) -> float:
        loss = model(batch(number, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return run


def worker(system: str, steps: int, live_bytes: int | None) -> None:
    """Runs one system on this rank; rank 0 prints what it measured."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    make = {"zfunc": zfunc_step, "ddp": ddp_step, "fsdp2": fsdp2_step}[system]
    run = make(rank, live_bytes)
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


def launch(system: str, options: argparse.Namespace) -> dict:
    """Runs one system in new processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [os.path.abspath(__file__), "--worker", system, "--steps", str(options.steps)]
    if options.live_bytes is not None:
        command += ["--live-bytes", str(options.live_bytes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{system} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--live-bytes", type=int)
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.steps, options.live_bytes)
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
