"""Modules as pure functions: a torch module's forward, with its tensors as arguments.

Every call works on a copy of the module's structure in which the tensors given stand in the places
of the module's own; nothing is swapped in and out. So whatever the module does later with itself,
such as computing a checkpointed block again in the backward pass, it does with the tensors that it
was called with (under `torch.func.functional_call` it would read its own, in silence). A tensor
that the module has in several places is one leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zfunc.collective import scatter
from zfunc.errors import CaptureError, TreeMismatchError, explain
from zfunc.layout import P
from zfunc.state import State

__all__ = ["Apply", "module"]

Params = Mapping[str, Mapping[str, Tensor]]


class Apply:
    """A module's forward as a pure function of its tensors; made by `module`.

    Attributes:
        structure: the module without values: its tensors are on the meta device.
    """

    def __init__(self, structure: nn.Module):
        self.structure = structure
        self._params = {id(p): name for name, p in structure.named_parameters()}
        self._buffers = {id(b): name for name, b in structure.named_buffers()}

    def __reduce__(self) -> tuple[Any, ...]:
        return Apply, (self.structure,)  # the tables go by identity

    @property
    def trainable(self) -> dict[str, dict[str, bool]]:
        """What trains, for `zfunc.shard(..., trainable=)`: parameters that require gradients."""
        params = {name: p.requires_grad for name, p in self.structure.named_parameters()}
        return {"params": params, "buffers": dict.fromkeys(self._buffers.values(), False)}

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Each leaf's names in a file, for `load_safetensors`; none of what is not saved."""
        names: dict[str, tuple[str, ...]] = {}
        for kind, known in (("params", self._params), ("buffers", self._buffers)):
            for at, name in _everywhere(self.structure, kind):
                path = f"{kind}/{known[at]}"
                names[path] = (*names.get(path, ()), *([] if name is None else [name]))
        return names

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Args:
            params: the parameters and buffers, as `module` returns them.
            args: what the module's forward takes.
            kwargs: what it takes by name.

        Returns:
            What the module returns.

        Raises:
            CaptureError: the module writes into one of its buffers.
            TreeMismatchError: a tensor is missing, or one is not the module's.
        """
        self._check(params)
        if writers := list(_writers(self.structure)):
            raise _buffers_written(writers[0])
        out, changed = self._run(params, args, kwargs, fresh=False)
        if changed:
            raise _buffers_written(next(iter(changed)))
        return out

    def with_buffers(self, params: Params, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Calls the module, and returns the buffers that it changed instead of changing them.

        Args:
            params: as for a call.
            args: as for a call.
            kwargs: as for a call.

        Returns:
            What the module returns, and a dict of the new values of the buffers it wrote into.
        """
        self._check(params)
        return self._run(params, args, kwargs, fresh=True)

    def updated(self, state: State, changed: Mapping[str, Tensor]) -> State:
        """The state with new values of buffers: their mean over all ranks, integers as they are.

        Every rank calls it, with the same names.

        Args:
            state: of a step whose parameters are those of the module.
            changed: what `with_buffers` returned on this rank, as `metrics["aux"]` hands it out.

        Returns:
            A state that shares the other leaves; like every state it is for one more step.
        """
        own, layouts = dict(state.params["buffers"]), {}
        for name in sorted(changed):
            layouts[name] = own[name].layout
            own[name] = changed[name].detach()
        floats = [name for name in sorted(changed) if own[name].is_floating_point()]
        if floats:
            flat = torch.cat([own[name].reshape(-1) for name in floats])
            mean = scatter(flat, layouts[floats[0]].mesh, P(), reduce="mean").local
            sizes = [own[name].numel() for name in floats]
            for name, part in zip(floats, mean.split(sizes), strict=True):
                own[name] = part.view(own[name].shape).to(own[name].dtype)
        for name, layout in layouts.items():
            own[name] = scatter(own[name], layout.mesh, layout.spec)
        params = {"params": state.params["params"], "buffers": own}
        return dataclasses.replace(state, params=params)

    def train(self, mode: bool = True) -> Apply:
        """The same module in training or evaluation mode; this one stays as it is."""
        return Apply(self._copied(dict(self.structure.named_parameters()), None).train(mode))

    def eval(self) -> Apply:
        """The same module in evaluation mode."""
        return self.train(False)

    def _run(
        self, params: Params, args: Any, kwargs: Any, *, fresh: bool
    ) -> tuple[Any, dict[str, Tensor]]:
        given = {name: buffer.detach() for name, buffer in params["buffers"].items()}
        if fresh:
            given = {name: buffer.clone() for name, buffer in given.items()}
        versions = {name: buffer._version for name, buffer in given.items()}
        called = self._copied(params["params"], given)
        out = called(*args, **kwargs)
        changed, quiet = {}, set(_writers(self.structure))  # batch norm raises no version
        for name in given:
            now = _at(called, name)
            if now is not given[name] or now._version != versions[name] or name in quiet:
                changed[name] = now.detach()
        return out, changed

    def _copied(self, params: Mapping[str, Tensor], buffers: Any) -> nn.Module:
        """The structure with other tensors; everything else is shared or copied."""
        memo: dict[int, Any] = {id(x): x for x in _loose(self.structure)}
        memo |= {at: params[name] for at, name in self._params.items()}
        if buffers is not None:
            memo |= {at: buffers[name] for at, name in self._buffers.items()}
        return copy.deepcopy(self.structure, memo)

    def _check(self, params: Params) -> None:
        for kind, names in (("params", self._params), ("buffers", self._buffers)):
            got, expected = set(params[kind]), set(names.values())
            for name in sorted(got ^ expected):
                raise TreeMismatchError(
                    explain(
                        f"params[{kind!r}] is not that of the module",
                        expected=f"{name!r}" if name in expected else f"no {name!r}",
                        got="nothing of that name" if name in expected else "one",
                        do="give the tree that zfunc.module returned, or one of its structure",
                    )
                )


def module(
    nn_module: nn.Module | Callable[[], nn.Module],
) -> tuple[Apply, dict[str, dict[str, Tensor]]]:
    """Turns a torch module into a pure function and the tree of its tensors.

    A tensor that the module has at several names is one leaf, at the first of them. Buffers do not
    train: `zfunc.shard(loss_fn, mesh, trainable=apply_fn.trainable)`.

    Args:
        nn_module: a module; or a function that makes one: then parameters have no memory (they are
            on the meta device) and buffers have their values, ready for `load_safetensors`.

    Returns:
        `apply_fn`, see `Apply`: `apply_fn(params, *args, **kwargs)`; and
        `{"params": {name: tensor}, "buffers": {name: tensor}}`, which shares memory with the
        module.

    Example:
        >>> import zfunc
        >>> net = nn.Linear(3, 2)
        >>> apply_fn, params = zfunc.module(net)
        >>> sorted(params["params"])
        ['bias', 'weight']
        >>> x = torch.ones(4, 3)
        >>> torch.equal(apply_fn(params, x), net(x))
        True
    """
    if not isinstance(nn_module, nn.Module):
        nn_module = _without_memory(nn_module)
    params = {name: p.detach() for name, p in nn_module.named_parameters()}
    buffers = {name: b.detach() for name, b in nn_module.named_buffers()}
    memo: dict[int, Any] = {id(x): x for x in _loose(nn_module)}
    for tensor in (*nn_module.parameters(), *nn_module.buffers()):
        memo[id(tensor)] = _on_meta(tensor)
    structure = copy.deepcopy(nn_module, memo)
    return Apply(structure), {"params": params, "buffers": buffers}


def _without_memory(make: Callable[[], nn.Module]) -> nn.Module:
    """Makes a module whose parameters are moved to the meta device one by one."""

    def hook(_: nn.Module, __: str, param: nn.Parameter | None) -> Any:
        # What is tied is registered again: it stays the same object.
        return None if param is None or param.is_meta else _on_meta(param)

    handle = register_module_parameter_registration_hook(hook)
    try:
        return make()
    finally:
        handle.remove()


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _loose(nn_module: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold as plain attributes: no arguments, they stay what they are."""
    known = {id(x) for x in (*nn_module.parameters(), *nn_module.buffers())}
    for part in nn_module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and id(value) not in known:
                yield value


def _writers(nn_module: nn.Module) -> Iterator[str]:
    """Names of the buffers that batch norm writes into, as its operator does not say."""
    for prefix, part in nn_module.named_modules():
        norm = isinstance(part, nn.modules.batchnorm._NormBase)
        if norm and part.training and part.track_running_stats:
            yield from (f"{prefix}.{last}".lstrip(".") for last in ("running_mean", "running_var"))


def _everywhere(nn_module: nn.Module, kind: str) -> Iterator[tuple[int, str | None]]:
    """Every place of every tensor: its identity, and its name, or None where it is not saved."""
    for prefix, part in nn_module.named_modules(remove_duplicate=False):
        held = part._parameters if kind == "params" else part._buffers
        for last, tensor in held.items():
            if tensor is not None:
                saved = last not in part._non_persistent_buffers_set
                yield id(tensor), f"{prefix}.{last}".lstrip(".") if saved else None


def _at(nn_module: nn.Module, name: str) -> Any:
    prefix, _, last = name.rpartition(".")
    return nn_module.get_submodule(prefix)._buffers[last]


def _buffers_written(name: str) -> CaptureError:
    return CaptureError(
        explain(
            f"the module writes into its buffer {name!r}",
            expected="a function without side effects",
            do="call apply_fn.with_buffers(...), which returns new values, and hand them on as aux"
            " (has_aux=True); or use apply_fn.eval()",
        )
    )
