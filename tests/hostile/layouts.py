"""Layouts and dtypes of tensors: views, strides, every kind of number, in params and batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hostile.case import case, ints
from tests.hostile.trees import forward, mlp, rows


def _views(rank: int) -> Any:
    buffer = ints(1, 40)
    return {"a": buffer[:12].view(4, 3), "b": buffer[12:15], "c": buffer[4:16].view(3, 4)}


@case(_views, rows)
def views_of_one_buffer(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()


@case(
    lambda rank: {"a": ints(1, 3, 4).t(), "b": ints(2, 6)[::2], "c": ints(3, 4, 6).t()[::2]}, rows
)
def transposed_and_strided(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()


def _images(rank: int, step: int) -> Any:
    return ints(10 * step + rank, 1 + rank % 2, 2, 4, 4).contiguous(
        memory_format=torch.channels_last
    )


def _kernels(rank: int) -> Any:
    last = torch.channels_last
    return [ints(1, 3, 2, 3, 3).contiguous(memory_format=last), ints(2, 2, 3, 1, 1), ints(3, 3)]


@case(_kernels, _images)
def channels_last(p: Any, b: Any) -> Tensor:
    h = torch.relu(F.conv2d(b, p[0], p[2], padding=1))
    return F.conv2d(h, p[1]).square().sum()


def _expanded(rank: int) -> Any:
    return {"a": ints(1, 3).expand(4, 3), "b": ints(2).expand(3), "c": ints(3, 3, 1).expand(3, 4)}


@case(_expanded, rows)
def expanded_with_stride_0(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).square().sum()


def _odd_rows(rank: int, step: int) -> Any:
    x = ints(7 * rank + step, 4, 2)
    return {"x": x.t(), "y": ints(step, 4).expand(3, 4), "z": x[1:3, :1].expand(2, 4), "w": x.t()}


@case(mlp, _odd_rows)
def batches_of_odd_strides_and_one_buffer(p: Any, b: Any) -> Tensor:
    return sum(forward(p, b[k]).square().sum() for k in "xyzw")  # pyright: ignore


def _negative(rank: int, step: int) -> Any:
    z = torch.complex(ints(rank, 2, 4), ints(step, 2, 4))
    return {"x": z.conj(), "i": z.conj().imag}


@case(lambda rank: ints(1, 4, 3), _negative)
def batches_with_conjugate_and_negative_bits(p: Any, b: Any) -> Tensor:
    return (b["i"] @ p).square().sum() + (b["x"].imag * 2 @ p).sum()


@case(lambda rank: {"z": torch.complex(ints(1, 3), ints(2, 3)).conj(), "n": ints(4, 3)}, rows)
def leaves_with_a_conjugate_bit(p: Any, b: Any) -> Tensor:
    return (p["z"] * p["z"].conj()).real.sum() * b["x"].sum() + p["n"].sum()


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _mixed(rank: int) -> Any:
    made = {str(d): ints(n, 2, 3, dtype=d) for n, d in enumerate(FLOATS)}
    made |= {"c128": torch.complex(ints(5, 2, 3), ints(6, 2, 3))}
    made |= {"c64": torch.complex(ints(5, 3).float(), ints(6, 3).float())}
    return made | {"long": ints(7, 3, dtype=torch.int64), "u8": ints(8, 3).abs().byte()}


@case(_mixed, rows)
def mixed_dtypes_and_complex_leaves(p: Any, b: Any) -> Tensor:
    total = b["x"].sum() * (p["long"] + p["u8"]).sum()
    for leaf in p.values():
        if leaf.is_complex():
            total = total + (leaf * leaf.conj()).real.sum().double() + leaf.imag.sum()
        elif leaf.is_floating_point():
            total = total + (leaf * leaf).sum().double() * b["x"][0, 0]
    return total


def _halves(rank: int) -> Any:
    return {k: v.bfloat16() for k, v in mlp().items()}


@case(_halves, lambda rank, step: {"x": rows(rank, step)["x"].bfloat16()})
def all_leaves_in_bfloat16(p: Any, b: Any) -> Tensor:
    return forward(p, b["x"]).clamp(-2, 2).float().sum()


def _floats(rank: int) -> Any:
    return {k: v.float() for k, v in mlp().items()} | {"half": ints(9, 3).half()}


@case(_floats, lambda rank, step: {"x": rows(rank, step)["x"].float()})
def a_loss_in_half_precision(p: Any, b: Any) -> Tensor:
    return (forward(p, b["x"]).clamp(-1, 1).sum() + p["half"].sum()).half()


@case(mlp, rows)
def autocast_in_the_loss(p: Any, b: Any) -> Tensor:
    p = {k: v.float() for k, v in p.items()}
    with torch.autocast("cpu", torch.bfloat16):
        h = torch.relu(b["x"].float() @ p["a"])
        assert h.dtype == torch.bfloat16
        h = h @ p["c"]
    return h.float().clamp(-4, 4).sum() + p["b"].sum()


@case(mlp, rows)
def a_cast_of_every_leaf(p: Any, b: Any) -> Tensor:
    q = {k: v.bfloat16() for k, v in p.items()}
    return forward(q, b["x"].bfloat16()).clamp(-4, 4).double().sum()


@case(lambda rank: {"v": ints(1, 4, 3) + 0.5, "g": ints(2, 3)}, rows, tol=1e-10)
def weight_norm(p: Any, b: Any) -> Tensor:
    w = p["v"] * (p["g"] / p["v"].norm(dim=0))
    return torch.tanh(b["x"] @ w).square().sum() + F.normalize(p["v"]).sum()


@case(lambda rank: [{"w": ints(n, 4, 4), "b": ints(9 + n, 4)} for n in range(3)], rows)
def a_stack_of_layers(p: Any, b: Any) -> Tensor:
    w, bias = torch.stack([x["w"] for x in p]), torch.stack([x["b"] for x in p])
    h = b["x"]
    for n in range(3):
        h = torch.relu(h @ w[n] + bias[n]).clamp(max=4)
    return h.square().sum() + torch.einsum("lij,bj->", w, b["x"])


@case(mlp, rows)
def in_place_writes_into_what_derives_from_leaves(p: Any, b: Any) -> Tensor:
    a = p["a"].clone()
    a[0] = 0
    a.mul_(p["b"])
    c = p["c"].detach().clone()
    c.add_(1)
    return (torch.relu(b["x"] @ a) @ (p["c"] * c)).sum()


@case(mlp, rows)
def in_place_writes_into_activations(p: Any, b: Any) -> Tensor:
    h = b["x"] @ p["a"]
    h += p["b"]
    h[:, 0] *= 2
    view = h.t()[1]
    view.add_(1)
    h.relu_()
    out = torch.zeros(h.shape[0], 4, dtype=h.dtype)
    out[:, 1:] = h
    out.index_add_(1, torch.tensor([0, 2]), h[:, :2])
    return (out @ p["c"].t()).square().sum()
