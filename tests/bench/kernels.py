"""Times the native kernels beside torch: `python tests/bench/kernels.py [--isa avx2]`.

Runs alternate, so that a busy machine slows both; a ratio is torch's median over ours, above 1 is
faster than torch. The AdamW floor is 28 bytes per element: four reads and three writes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from zfunc import ops

ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
Timed = dict[str, Callable[[], object]]


def measure(functions: Timed, repeats: int, calls: int = 1) -> dict[str, list[float]]:
    """Seconds per call of each function, run in turns after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if repeat:
                times[name].append((time.perf_counter() - start) / calls)
    return times


def show(title: str, times: dict[str, list[float]], traffic_bytes: int) -> None:
    """Prints one block of rows; the first function is the one that the others are held against."""
    base = statistics.median(next(iter(times.values())))
    print(f"\n{title}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"  {name:<28} median {median * 1e3:8.3f} ms  min {min(seconds) * 1e3:8.3f} ms  "
            f"{traffic_bytes / median / 1e9:6.1f} GB/s  ratio {base / median:5.2f}"
        )


def make(sizes: list[int]) -> list[list[torch.Tensor]]:
    """Parameters, gradients, first and second moments of leaves of these sizes."""
    params, grads, mu, nu = ([torch.randn(n) for n in sizes] for _ in range(4))
    for x in nu:
        x.abs_()
    return [params, grads, mu, nu]


def torch_fused(leaves: list[list[torch.Tensor]], clip: float | None) -> Callable[[], object]:
    """`torch._fused_adamw_`; a clip factor is a pass of its own, as in `clip_grad_norm_`."""
    params, grads, mu, nu = leaves
    steps = [torch.tensor(10.0) for _ in params]
    rates = {"lr": 1e-3, "beta1": ADAM["b1"], "beta2": ADAM["b2"], "eps": ADAM["eps"]}
    decay = {"weight_decay": ADAM["weight_decay"], "amsgrad": False, "maximize": False}

    def run() -> None:
        if clip is not None:
            torch._foreach_mul_(grads, clip)
        torch._fused_adamw_(params, grads, mu, nu, [], steps, **rates, **decay)

    return run


def ours(
    leaves: list[list[torch.Tensor]], isa: str, threads: int, clip: float | None
) -> Callable[[], object]:
    """`ops.adamw_` on one instruction set."""

    def run() -> None:
        os.environ["ZFUNC_ISA"] = isa
        steps, scale = [10] * len(leaves[0]), 1.0 if clip is None else clip
        ops.adamw_(*leaves, lr=1e-3, **ADAM, step=steps, grad_scale=scale, threads=threads)

    return run


def bench_adamw(title: str, sizes: list[int], isas: list[str], args: argparse.Namespace) -> None:
    """AdamW alone and with a clip factor, which ours applies in the same pass."""
    leaves = make(sizes)
    small = sum(sizes) < 1 << 20
    for clip, note in ((None, ""), (1.0, ", with a clip factor")):
        functions: Timed = {"torch._fused_adamw_": torch_fused(leaves, clip)}
        for isa in isas:
            functions[f"ops.adamw_ {isa}"] = ours(leaves, isa, args.threads, clip)
        times = measure(functions, args.repeats, calls=20 if small else 1)
        show(f"{title}{note}", times, 28 * sum(sizes))


def bench_sums(isas: list[str], args: argparse.Namespace) -> None:
    """Sum of squares of one large tensor per dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(args.numel).to(dtype)
        functions: Timed = {"torch.linalg.vector_norm": lambda x=x: torch.linalg.vector_norm(x)}

        def run(isa: str, x: torch.Tensor = x) -> None:
            os.environ["ZFUNC_ISA"] = isa
            ops.sum_squares([x], threads=args.threads)

        for isa in isas:
            functions[f"ops.sum_squares {isa}"] = lambda isa=isa, run=run: run(isa)
        show(f"sum of squares, {dtype}", measure(functions, args.repeats), x.nbytes)


def main() -> None:
    """Prints all blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=33_700_000 // 2)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", action="append", help="default: all that this processor runs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    isas = args.isa or list(ops.isas())
    print(f"torch {torch.__version__}, {args.threads} thread(s), kernels for {', '.join(isas)}")
    bench_adamw(f"AdamW, one leaf of {args.numel} elements", [args.numel], isas, args)
    bench_adamw("AdamW, one leaf of 16384 elements", [16384], isas, args)
    bench_adamw(
        "AdamW, 1000 leaves of 1 to 16 elements", [1 + i % 16 for i in range(1000)], isas, args
    )
    bench_sums(isas, args)


if __name__ == "__main__":
    main()
