"""Runs a captured program op by op on real tensors, and counts what lives.

An oracle for passes over captured programs that shares no code with the executor: `check` compares
the program before the remat pass, the one after it and plain torch, bit for bit.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.checker import check_stage
from zfunc import tree
from zfunc.capture import Argument, LeafSlot, describe, to_program, trace_loss
from zfunc.layout import Dtypes, Flat, ShapeDtype, layouts_of
from zfunc.meshes import abstract_mesh
from zfunc.passes.remat import rematerialise
from zfunc.program.ir import Collective, Compute, Program, Rng, map_refs, reads, writes

__all__ = [
    "argument",
    "capture",
    "check",
    "copies",
    "eager",
    "equal",
    "peak_bytes",
    "recomputed",
    "run",
]


def argument(params: Any, *, trainable: bool = True) -> Argument:
    leaves, structure = tree.flatten(params)
    paths = tree.leaf_paths(params)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    layouts = layouts_of(Flat(), params, shapes, paths, abstract_mesh({"shard": 2}))
    slots = tuple(
        LeafSlot(
            path,
            ShapeDtype(tuple(leaf.shape), leaf.dtype),
            layout,
            trainable,
            Dtypes.plain(leaf.dtype),
        )
        for path, leaf, layout in zip(paths, leaves, layouts, strict=True)
    )
    return Argument(structure, slots)


def capture(loss: Callable[..., Any], params: Any, batch: Any, *, has_aux: bool = False) -> Program:
    described, _ = describe(batch, "batch", torch.device("cpu"))
    traced = trace_loss(loss, argument(params), described, key=False, has_aux=has_aux)
    return to_program(traced, "loss")


def run(program: Program, params: Any, batch: Any) -> list[Tensor]:
    """Interprets a program: loss, aux, gradients. Values are dropped after their last reader."""
    (micro,) = program.micros
    env: dict[int, Tensor] = dict(program.constants)
    env |= dict(zip((leaf.full for leaf in program.leaves), tree.leaves(params), strict=True))
    env |= dict(zip(micro.inputs, tree.leaves(batch), strict=True))
    outputs = [v for v in (micro.loss, *micro.aux, *micro.grads) if v is not None]
    last = {value: place for place, op in enumerate(program.ops) for value in reads(op)}
    storages = {value: tensor.untyped_storage().data_ptr() for value, tensor in env.items()}
    recorded: dict[int, Tensor] = {}
    outside: list[Tensor] = []
    for place, op in enumerate(program.ops):
        if isinstance(op, Rng):
            if op.action == "record":
                recorded[op.slot] = torch.get_rng_state()
            elif op.action == "replay":
                outside.append(torch.get_rng_state())
                torch.set_rng_state(recorded[op.slot])
            else:
                torch.set_rng_state(outside.pop())
            continue
        if isinstance(op, Collective):
            env[op.out] = env[op.source] * 2
            continue
        assert isinstance(op, Compute)
        args, kwargs = _values(op.args, env), _values(dict(op.kwargs), env)
        with torch.no_grad():
            made = op.target(*args, **kwargs)
        for out, tensor in zip(op.outs, made if op.packed else [made], strict=True):
            if out is not None:
                env[out] = tensor
                storage, owner = tensor.untyped_storage().data_ptr(), program.values[out].owner
                assert storages.setdefault(owner, storage) == storage or owner == out
                storages[owner] = storage
        for value in reads(op):
            if last[value] == place and value not in outputs:
                env.pop(value, None)
    assert not outside
    return [env[value].clone() for value in outputs]


def _values(args: Any, env: Mapping[int, Tensor]) -> Any:
    tensors: dict[int, Tensor] = {}

    def note(value: int) -> int:
        tensors[value] = env[value]
        return value

    def fill(item: Any) -> Any:
        if isinstance(item, tuple | list):
            return type(item)(fill(one) for one in item)
        if isinstance(item, dict):
            return {key: fill(one) for key, one in item.items()}
        return tensors[item.id] if hasattr(item, "id") else item

    return fill(map_refs(args, note))


def eager(loss: Callable[..., Any], params: Any, batch: Any) -> list[Tensor]:
    """Plain torch: the loss and the gradients that are not zero throughout."""
    leaves, structure = tree.flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = loss(tree.unflatten(structure, leaves), batch)
    return [out.detach(), *torch.autograd.grad(out, leaves)]


def peak_bytes(program: Program) -> int:
    """Most bytes alive at once in storages that ops made, final gradients aside."""
    values = program.values
    owners = [value.owner for value in values]
    grads = {owners[grad] for grad in program.micros[0].grads if grad is not None}
    last: dict[int, int] = {}
    for place, op in enumerate(program.ops):
        for value in (*reads(op), *writes(op)):
            last[owners[value]] = place
    born = [owners[v] for op in program.ops for v in writes(op) if owners[v] == v]
    dies = collections.defaultdict(list)
    for owner in born:
        dies[last[owner]].append(owner)
    live = peak = 0
    for place, op in enumerate(program.ops):
        live += sum(values[v].nbytes for v in writes(op) if owners[v] == v and v not in grads)
        peak = max(peak, live)
        live -= sum(values[owner].nbytes for owner in dies[place] if owner not in grads)
    return peak


def recomputed(program: Program) -> list[Compute]:
    return [op for op in program.ops if isinstance(op, Compute) and op.phase == "recompute"]


def copies(program: Program) -> collections.Counter[str]:
    """How often each value of the forward pass is made again."""
    names = (program.values[out].name for op in recomputed(program) for out in writes(op))
    return collections.Counter(name.rstrip("'") for name in names)


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def check(loss: Callable[..., Any], params: Any, batch: Any, **options: Any) -> Program:
    """Runs a loss before and after the pass and in plain torch: the same bits everywhere."""
    before = capture(loss, params, batch)
    after = rematerialise(before, **options)
    results, states = [], []
    for function in (
        lambda: run(before, params, batch),
        lambda: run(after, params, batch),
        lambda: eager(loss, params, batch),
    ):
        torch.manual_seed(11)
        results.append(function())
        states.append(torch.get_rng_state())
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])
    assert torch.equal(states[0], states[1])
    check_stage(after, "remat")
    check_bookkeeping(before, after)
    return after


def check_bookkeeping(before: Program, after: Program) -> None:
    """Values are made before they are read, once; copies keep shape, bytes and owner."""
    made = {leaf.full for leaf in after.leaves} | set(after.micros[0].inputs) | set(after.constants)
    for op in after.ops:
        assert made.issuperset(reads(op))
        assert made.isdisjoint(writes(op))
        made.update(writes(op))
        assert all(after.values[out].owner in made for out in writes(op))
    by_name = {value.name: value for value in before.values}
    for value in after.values[len(before.values) :]:
        old = by_name[value.name.rstrip("'")]
        assert (value.spec, value.nbytes, value.role) == (old.spec, old.nbytes, old.role)
        old_owner = before.values[old.owner].name
        assert after.values[value.owner].name.rstrip("'") == old_owner
    depths = {
        before.values[out].name: len(op.regions)
        for op in before.ops
        if isinstance(op, Compute)
        for out in writes(op)
    }
    assert all(count <= depths[name] for name, count in copies(after).items())
