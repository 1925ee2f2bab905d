"""Rules by path: which leaf is compressed how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
from torch import Tensor

from zfunc import tree
from zfunc.compress.prune import Keep, Movement
from zfunc.compress.quantise import FakeQuantise

__all__ = ["Rules", "transform", "walk"]

Rule = Any
Rules = Mapping[str, Rule | Sequence[Rule]]


def transform(params: Any, rules: Rules, *, keep: Keep | None = None, scores: Any = None) -> Any:
    """The tree that a compressed model computes with; differentiable.

    Args:
        params: whole parameters, as a loss gets them.
        rules: glob of paths -> a rule, or several that are applied in turn (prune, then quantise).
            The first glob that matches a leaf counts; other leaves stay.
        keep: the part that pruning rules without their own `keep` keep; a 0-d tensor, such as a
            schedule's value in the batch, changes from step to step without a new capture.
        scores: a tree like `params`, for `Movement`.

    Returns:
        A tree like `params`.

    Raises:
        TreeMismatchError: a glob matches no leaf.
        ValueError: a rule lacks its `keep` or its scores.

    Example:
        >>> import torch
        >>> from zfunc import compress
        >>> params = {"w": torch.tensor([[1.0, -0.3], [0.2, 0.1]]), "b": torch.ones(2)}
        >>> transform(params, {"w": compress.Magnitude(0.5)})["w"]
        tensor([[ 1.0000, -0.3000],
                [ 0.0000,  0.0000]])
    """
    rows = walk(params, rules)
    marks = [None] * len(rows) if scores is None else tree.leaves(scores)
    made = []
    for (_, leaf, applied), score in zip(rows, marks, strict=True):
        for rule in applied:
            if isinstance(rule, FakeQuantise):
                leaf = rule(leaf)
            elif isinstance(rule, Movement):
                if score is None:
                    raise ValueError("Movement needs scores: transform(..., scores=a tree)")
                leaf = rule(leaf, keep, scores=score)
            else:
                leaf = rule(leaf, keep)
        made.append(leaf)
    return tree.unflatten(tree.structure(params), made)


def walk(params: Any, rules: Rules) -> list[tuple[str, Any, tuple[Rule, ...]]]:
    """The path, the leaf and the rules of every leaf."""
    chosen = [_several(rule) for rule in rules.values()] + [()]
    globs = {glob: number for number, glob in enumerate(rules)}
    rest = {} if "**" in rules else {"**": len(rules)}
    labels = tree.leaves(tree.label(params, {**globs, **rest}))
    paths, leaves, _ = optree.tree_flatten_with_path(params, namespace=tree.NAMESPACE)
    names = map(tree.glob_path, paths)
    return [
        (name, leaf, chosen[number] if isinstance(leaf, Tensor) else ())
        for name, leaf, number in zip(names, leaves, labels, strict=True)
    ]


def _several(rule: Rule | Sequence[Rule]) -> tuple[Rule, ...]:
    return tuple(rule) if isinstance(rule, Sequence) else (rule,)
