"""Trees: optree with zfunc's namespace, plus leaf paths, prefix trees and labels by path glob.

Dict keys are sorted, so the order of leaves (the canonical order) is the same on every rank,
whatever the insertion order was. `None` is no leaf. Every per-leaf option of the library goes
through `broadcast_prefix`, so that all of them accept a prefix tree and report a mismatch alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import optree
from optree import pytree as _pytree

from zfunc.errors import TreeMismatchError, explain

__all__ = [
    "NAMESPACE",
    "all",
    "any",
    "broadcast_prefix",
    "flatten",
    "glob_path",
    "label",
    "leaf_paths",
    "leaves",
    "map",
    "map_with_path",
    "mask",
    "reduce",
    "register_node",
    "structure",
    "unflatten",
]

NAMESPACE = "zfunc"

_tree = _pytree.reexport(namespace=NAMESPACE, module="zfunc._optree")
flatten = _tree.flatten
unflatten = _tree.unflatten
leaves = _tree.leaves
structure = _tree.structure
map = _tree.map
map_with_path = _tree.map_with_path
reduce = _tree.reduce
all = _tree.all
any = _tree.any
register_node = _tree.register_node


def leaf_paths(
    tree: Any, root: str = "params", *, is_leaf: Callable[[Any], bool] | None = None
) -> list[str]:
    """Spells the path of every leaf as the code that reads it.

    Args:
        tree: any tree.
        root: the name that the tree has for the reader.
        is_leaf: what else counts as a leaf.

    Returns:
        One string per leaf, in canonical order.

    Example:
        >>> leaf_paths({"h": [{"w": 1, "b": 2}]})
        ["params['h'][0]['b']", "params['h'][0]['w']"]
    """
    accessors = optree.tree_accessors(tree, is_leaf, namespace=NAMESPACE)
    return [accessor.codify(root) for accessor in accessors]


def glob_path(path: tuple[Any, ...]) -> str:
    """Joins the entries of an optree path by "/": what a glob of `label` is matched against."""
    return "/".join(str(entry) for entry in path)


def broadcast_prefix(
    prefix: Any,
    tree: Any,
    *,
    name: str,
    is_leaf: Callable[[Any], bool] | None = None,
    is_prefix_leaf: Callable[[Any], bool] | None = None,
) -> list[Any]:
    """Repeats each leaf of a prefix tree for every leaf of the subtree that it stands for.

    Args:
        prefix: a tree whose leaves each apply to a whole subtree of `tree`.
        tree: the full tree.
        name: what the prefix is called in an error, such as "specs['params']".
        is_leaf: what counts as a leaf of `tree`.
        is_prefix_leaf: what counts as a leaf of `prefix`.

    Returns:
        One entry per leaf of `tree`, in canonical order.

    Raises:
        TreeMismatchError: `prefix` is not a prefix of `tree`; names the path.

    Example:
        >>> broadcast_prefix({"a": 1, "b": 2}, {"a": [0, 0], "b": 0}, name="lr")
        [1, 1, 2]
    """
    # An opaque box keeps prefix leaves that are themselves trees (tuples, None) in one piece.
    boxed = optree.tree_map(_Box, prefix, is_leaf=is_prefix_leaf, namespace=NAMESPACE)
    skeleton = optree.tree_map(lambda _: 0, tree, is_leaf=is_leaf, namespace=NAMESPACE)
    try:
        boxes = optree.broadcast_prefix(boxed, skeleton, namespace=NAMESPACE)
    except ValueError as mismatch:
        reasons = optree.prefix_errors(boxed, skeleton, namespace=NAMESPACE)
        reason = str(reasons[0](name)) if reasons else str(mismatch)
        raise TreeMismatchError(
            explain(
                f"{name} is not a prefix of the tree that it applies to",
                expected=optree.tree_structure(skeleton, namespace=NAMESPACE),
                got=optree.tree_structure(boxed, namespace=NAMESPACE),
                do=f"give one value, or a tree with the same keys down to where it stops. {reason}",
            )
        ) from None
    return [box.value for box in boxes]


def label(tree: Any, globs: Mapping[str, Any]) -> Any:
    """Labels every leaf by the first glob that matches its path.

    `*`, `?` and `[...]` match within one path entry, `**` any number of entries. Entries are joined
    by "/", as in "blocks/0/attn/w". A `Sharded` node is one leaf.

    Args:
        tree: any tree; only its structure is read.
        globs: glob -> label, tried in order.

    Returns:
        A tree of labels with the structure of `tree`.

    Raises:
        TreeMismatchError: a leaf matches no glob, or a glob matches no leaf.

    Example:
        >>> label({"head": 0, "body": {"w": 0}}, {"head": "fast", "**": "slow"})
        {'head': 'fast', 'body': {'w': 'slow'}}
    """
    patterns = {glob: re.compile(_translate(glob)) for glob in globs}
    seen: set[str] = set()

    def pick(path: tuple[Any, ...], _: Any) -> Any:
        text = glob_path(path)
        matching = [glob for glob, pattern in patterns.items() if pattern.fullmatch(text)]
        seen.update(matching)
        if not matching:
            raise TreeMismatchError(
                explain(
                    f"leaf '{text}' matches no glob",
                    expected=f"one of {list(globs)}",
                    do="add a glob for it, or a last '**' for all the rest",
                )
            )
        return globs[matching[0]]

    labels = map_with_path(pick, tree, is_leaf=_is_named_whole)
    unused = [glob for glob in globs if glob not in seen]
    if unused and seen:
        paths = optree.tree_paths(tree, _is_named_whole, namespace=NAMESPACE)
        near = [glob_path(path) for path in paths]
        raise TreeMismatchError(
            explain(
                f"glob {unused[0]!r} matches no leaf",
                expected=f"a pattern over paths such as {near[:3]}",
                do="remove it or mend its spelling",
            )
        )
    return labels


def mask(tree: Any, *globs: str) -> Any:
    """Marks with True the leaves whose path matches one of the globs.

    Args:
        tree: any tree; only its structure is read.
        globs: as for `label`; each must match at least one leaf.

    Returns:
        A tree of bools with the structure of `tree`.

    Raises:
        TreeMismatchError: a glob matches no leaf.

    Example:
        >>> mask({"w": 0, "b": 0}, "w")
        {'w': True, 'b': False}
    """
    rest = {} if "**" in globs else {"**": False}
    return label(tree, dict.fromkeys(globs, True) | rest)


class _Box:
    """Holds one prefix leaf, opaque to the tree library."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def _is_named_whole(node: Any) -> bool:
    """Whether a node counts as one leaf for labels: classes say so by `is_named_whole = True`."""
    return getattr(type(node), "is_named_whole", False)


def _translate(glob: str) -> str:
    """Turns a path glob into a regular expression."""
    text, parts = "", glob.split("/")
    parts = [part for i, part in enumerate(parts) if part != "**" or parts[i - 1 : i] != ["**"]]
    for index, part in enumerate(parts):
        slash = "/" if index and parts[index - 1] != "**" else ""
        if part != "**":
            text += slash + _translate_entry(part)
        elif index < len(parts) - 1:
            text += slash + "(?:[^/]*/)*"
        else:
            text += "(?:/.*)?" if index else ".*"
    return text


def _translate_entry(part: str) -> str:
    """Turns the glob of one path entry into a regular expression that never matches a "/"."""
    text = ""
    for token in re.findall(r"\[(?:!?\]|!?[^\]!]|!!)[^\]]*\]|.", part, re.DOTALL):
        if token == "*":
            text += "[^/]*"
        elif token == "?":
            text += "[^/]"
        elif len(token) > 1:
            body = token[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^")
            text += f"(?!/)[{'^' + body[1:] if body.startswith('!') else body}]"
        else:
            text += re.escape(token)
    return text
