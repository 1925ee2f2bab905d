"""`spmd` and `infer`: any pure function of sharded parameters, without a gradient of its own.

Both capture the function, run the same passes as a step, and schedule its gathers; they differ only
in what they return. `spmd` is the general transform (statistics, Hessian-vector products,
evaluation), `infer` is a forward whose results each rank keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zfunc import tree
from zfunc.agree import (
    Proposal,
    agree,
    check_real,
    exchange_failures,
    hash_of,
    naming,
    raise_failures,
    telling_others,
)
from zfunc.capture import describe, refuse_shapes
from zfunc.comm import as_mesh
from zfunc.dynamic import call_forward
from zfunc.execute import Inputs, Interrupts, Outcome, deferred_interrupts
from zfunc.explain import Explanation, explain_programs
from zfunc.layout import Flat, P, layouts_of
from zfunc.lowered import Lowered
from zfunc.meshes import Mesh
from zfunc.params import ParamTable, leaf_facts
from zfunc.precision import keeping_params, with_precision
from zfunc.programs import Compiled, Programs
from zfunc.resolve import resolve
from zfunc.settings import Prefetch
from zfunc.sharded import Sharded, is_sharded

__all__ = ["Forward", "infer", "spmd"]

_MAX_TABLES = 64


def spmd(
    fn: Callable[..., Any],
    mesh: Mesh,
    *,
    out_specs: Any = P(),  # noqa: B008
    precision: Any = None,
    prefetch: Prefetch = Prefetch(),  # noqa: B008
) -> Forward:
    """Transforms a pure function of whole parameters into one of sharded parameters.

    Args:
        fn: `fn(params, *args)`; the `Sharded` leaves of `params` arrive whole, those of other
            arguments as such (read them with `gather`).
        mesh: the mesh.
        out_specs: a prefix tree of what is returned: `P()` gives this rank's value as it is,
            `Flat()` keeps this rank's slice of it, as a `Sharded` leaf.
        precision: in which dtype to compute, as for `shard`; what is stored stays as it is.
        prefetch: the byte budgets.

    Returns:
        A function of `(params, *args)`.

    Example:
        >>> import zfunc
        >>> x = zfunc.scatter({"w": torch.arange(4.0)}, zfunc.mesh(), Flat())
        >>> spmd(lambda p: p["w"].square().sum(), zfunc.mesh())(x)
        tensor(14.)
    """
    mesh = as_mesh(mesh)
    precision = keeping_params(precision)
    function = with_precision(fn, precision, loss=False)
    return Forward(Programs(function, mesh, prefetch), mesh, out_specs, precision)


def infer(
    apply_fn: Callable[..., Any],
    mesh: Mesh,
    *,
    precision: Any = None,
    prefetch: Prefetch = Prefetch(),  # noqa: B008
) -> Forward:
    """Transforms a forward function into one of sharded parameters: a step without a backward.

    Args:
        apply_fn: `apply_fn(params, *xs)`.
        mesh: the mesh.
        precision: in which dtype to compute, as for `shard`; what is stored stays as it is.
        prefetch: the byte budgets.

    Returns:
        `fwd(params, *xs)`, whose results are this rank's.

    Example:
        >>> import zfunc
        >>> x = zfunc.scatter({"w": torch.ones(2, 1)}, zfunc.mesh(), Flat())
        >>> infer(lambda p, x: x @ p["w"], zfunc.mesh())(x, torch.ones(1, 2))
        tensor([[2.]])
    """
    return spmd(apply_fn, mesh, precision=precision, prefetch=prefetch)


class Forward:
    """A function of sharded parameters; made by `spmd` and `infer`."""

    def __init__(self, programs: Programs, mesh: Mesh, out_specs: Any, precision: Any):
        self._programs = programs
        self._mesh = mesh
        self._out_specs = out_specs
        self._precision = precision
        self._tables: dict[Any, ParamTable] = {}

    def __call__(self, params: Any, *args: Any) -> Any:
        """Runs the function; every rank of the mesh must call.

        Args:
            params: a tree of `Sharded` leaves; not consumed.
            args: this rank's further arguments.

        Returns:
            What the function returns, by `out_specs`.

        Raises:
            RemoteRankError: another rank raised before the first collective, or in the middle.
        """
        what = f"a call of {self._programs.name}"
        with naming(what), deferred_interrupts() as interrupts:
            outcome, compiled = self._run(params, args, what, interrupts)
        return self._cut(compiled.aux(outcome, 0))

    def _run(
        self, params: Any, args: Any, what: str, interrupts: Interrupts
    ) -> tuple[Outcome, Compiled]:
        mesh = self._mesh
        with telling_others(mesh, what), interrupts.heard():
            check_real(mesh)
            table, compiled, tensors = self._prepare(params, args)
            leaves = table.leaves_of(params)
            leaves += [tensor for tensor in tensors if is_sharded(tensor)]
            pieces = [leaf.local for leaf in leaves]
            given = [getattr(tensor, "local", tensor) for tensor in tensors]
            refuse_shapes([*pieces, *given], params=params, args=args)
            inputs = Inputs(
                pieces,
                [given],
                [None],
                call=lambda fulls, _: call_forward(self._programs.function, table, fulls, args),
                threads=torch.get_num_threads(),
            )
            proposal = Proposal(
                compiled.digest,
                hash_of(what, table.facts_hash),
                lambda: f"{what}\n{table.facts}",
                compiled.pattern,
            )
        proposed = agree(mesh, proposal, what)
        if not proposed.alike:
            facts = table.facts_hash
            compiled = resolve(self._programs, compiled, proposed, facts, what, update=False)
        outcome = compiled.executor.run(inputs)
        if outcome.verdict is not None and outcome.verdict.failed_ranks:
            messages = exchange_failures(mesh, outcome.error, what)
            if outcome.error is None:
                raise_failures(list(outcome.verdict.failed_ranks), messages, what)
        if outcome.error is not None:
            raise outcome.error
        return outcome, compiled

    def lower(self, params_like: Any, *args_like: Any) -> Lowered:
        """Captures and plans without running; arguments may be `ShapeDtype`."""
        _, compiled, _ = self._prepare(params_like, args_like)
        return Lowered(compiled.program, self._mesh, 0, 0)

    def explain(self) -> Explanation:
        """How the function was captured, hits and misses."""
        return explain_programs(self._programs)

    def _prepare(self, params: Any, args: Any) -> tuple[ParamTable, Compiled, list[Any]]:
        structure = tree.structure(params)
        facts = leaf_facts(params)
        if (structure, facts) not in self._tables:
            specs = tree.map(lambda leaf: _spec_of(leaf), params, is_leaf=is_sharded)
            self._tables[structure, facts] = ParamTable.of(
                params, self._mesh, {"params": specs}, False, self._precision
            )
            if len(self._tables) > _MAX_TABLES:
                self._programs.forget(self._tables.pop(next(iter(self._tables))))
        table = self._tables[structure, facts]
        dynamic = self._programs.is_dynamic(table)
        argument, tensors = describe(tuple(args), "args", self._mesh.device, static=not dynamic)
        compiled = self._programs.forward(table, argument)
        return table, compiled, tensors if compiled.rung == "traced" else []

    def _cut(self, out: Any) -> Any:
        leaves, structure = tree.flatten(out)
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
        paths = tree.leaf_paths(out, "out")
        rows = layouts_of({"params": self._out_specs}, out, shapes, paths, self._mesh)
        made = []
        for leaf, row in zip(leaves, rows, strict=True):
            if isinstance(row.params.spec, Flat) and isinstance(leaf, torch.Tensor):
                start, stop = row.params.range
                made.append(Sharded(leaf.reshape(-1)[start:stop].clone(), row.params))
            else:
                made.append(leaf)
        return tree.unflatten(structure, made)


def _spec_of(leaf: Any) -> Any:
    return leaf.layout.spec if isinstance(leaf, Sharded) else P()
