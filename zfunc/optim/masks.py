"""Which leaves: masks and labels over a tree of parameters, resolved to one entry per leaf.

A mask is a tree of bools or a function `mask(path, shape) -> bool`; labels are a tree of strings or
a function `labels(path, shape) -> str`. Trees may be prefix trees. A function gets the leaf's path
as globs see it ("h/0/w") and the shape of the whole leaf, never that of a rank's piece.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import optree

from zfunc import tree
from zfunc.errors import TreeMismatchError, explain
from zfunc.sharded import is_sharded

__all__ = ["Labels", "Mask", "keep", "merge", "resolve_labels", "resolve_mask"]

Mask = Any | Callable[[str, tuple[int, ...]], bool]
Labels = Any | Callable[[str, tuple[int, ...]], str]


def resolve_mask(mask: Mask | None, params: Any) -> list[bool]:
    """Finds which leaves a mask marks; None marks all.

    Raises:
        TreeMismatchError: the mask is no prefix of the tree, or not made of bools.
    """
    marks = [True] * _count(params) if mask is None else _resolve(mask, params, "mask")
    for index, mark in enumerate(marks):
        if not isinstance(mark, bool):
            _raise(params, index, f"the mask has {mark!r}", expected="True or False")
    return marks


def resolve_labels(labels: Labels, params: Any, allowed: Collection[str]) -> list[str]:
    """Finds each leaf's label.

    Raises:
        TreeMismatchError: the labels are no prefix of the tree, or one is not allowed.
    """
    found = _resolve(labels, params, "labels")
    for index, label in enumerate(found):
        if label not in allowed:
            _raise(params, index, f"no transform has the label {label!r}", expected=list(allowed))
    return found


def keep(nodes: Any, marks: Sequence[bool]) -> Any:
    """Puts None where a leaf is not marked."""
    kept, structure = tree.flatten(nodes, is_leaf=is_sharded)
    pairs = zip(kept, marks, strict=True)
    return tree.unflatten(structure, [node if mark else None for node, mark in pairs])


def merge(nodes: Any, parts: Sequence[Any], sources: Sequence[int]) -> Any:
    """Takes each leaf from one of several parts.

    Args:
        nodes: a tree with all the leaves.
        parts: trees as `keep` makes them.
        sources: per leaf the number of the part that has it, -1 for `nodes` itself.

    Returns:
        A tree with the structure of `nodes`.
    """
    own, structure = tree.flatten(nodes, is_leaf=is_sharded)
    streams = [iter(tree.leaves(part, is_leaf=is_sharded)) for part in parts]
    pairs = zip(own, sources, strict=True)
    merged = [node if source < 0 else next(streams[source]) for node, source in pairs]
    return tree.unflatten(structure, merged)


def _resolve(choice: Any, params: Any, name: str) -> list[Any]:
    """One entry per leaf, from a prefix tree or from a function of path and shape."""
    if not callable(choice):
        return tree.broadcast_prefix(choice, params, name=name, is_leaf=is_sharded)
    paths, nodes, _ = optree.tree_flatten_with_path(params, is_sharded, namespace=tree.NAMESPACE)
    pairs = zip(paths, nodes, strict=True)
    return [choice(tree.glob_path(path), tuple(node.shape)) for path, node in pairs]


def _count(params: Any) -> int:
    return len(tree.leaves(params, is_leaf=is_sharded))


def _raise(params: Any, index: int, problem: str, *, expected: Any) -> None:
    path = tree.leaf_paths(params, is_leaf=is_sharded)[index]
    raise TreeMismatchError(
        explain(f"{problem} for {path}", expected=expected, do="change it, or cover the leaf")
    )
