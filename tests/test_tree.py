"""Trees: canonical order, prefix trees, labels by glob, and what their errors say."""

from __future__ import annotations

import fnmatch
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zfunc import tree
from zfunc.errors import TreeMismatchError
from zfunc.layout import Flat, Layout, P
from zfunc.meshes import abstract_mesh
from zfunc.sharded import Sharded, is_sharded

TREE = {"blocks": [{"w": 1, "b": 2}, {"w": 3, "b": 4}], "head": 5}


class Pair(NamedTuple):
    """A node with named children."""

    first: Any
    second: Any


trees = st.recursive(
    st.integers(0, 9) | st.none(),
    lambda children: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), children, max_size=3),
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.builds(Pair, children, children),
    ),
    max_leaves=12,
)


def test_order_does_not_depend_on_insertion():
    one, other = {"b": 1, "a": {"d": 2, "c": 3}}, {"a": {"c": 3, "d": 2}, "b": 1}
    assert tree.leaves(one) == tree.leaves(other) == [3, 2, 1]
    assert tree.structure(one) == tree.structure(other)
    assert tree.leaf_paths(one) == ["params['a']['c']", "params['a']['d']", "params['b']"]


@given(trees)
def test_flatten_and_unflatten_are_inverse(nodes: Any):
    leaves, structure = tree.flatten(nodes)
    assert tree.unflatten(structure, leaves) == nodes
    assert None not in leaves


@given(trees)
def test_paths_read_their_leaf(nodes: Any):
    pairs = zip(tree.leaf_paths(nodes, "nodes"), tree.leaves(nodes), strict=True)
    assert all(eval(path, {"nodes": nodes}) == leaf for path, leaf in pairs)


def test_a_leaf_of_its_own_has_the_path_of_the_root():
    assert tree.leaf_paths(3, "params") == ["params"]


def cut_short(draw: Any, nodes: Any) -> Any:
    """A random prefix of a tree."""
    if nodes is None or isinstance(nodes, int) or draw(st.booleans()):
        return draw(st.integers(100, 109))
    if isinstance(nodes, dict):
        return {key: cut_short(draw, node) for key, node in nodes.items()}
    if isinstance(nodes, Pair):
        return Pair(*(cut_short(draw, node) for node in nodes))
    return type(nodes)(cut_short(draw, node) for node in nodes)


def spread(prefix: Any, nodes: Any) -> list[int]:
    """The oracle of `broadcast_prefix`: walk both trees together."""
    if nodes is None:
        return []
    if isinstance(nodes, int):
        return [prefix]
    children = [nodes[k] for k in sorted(nodes)] if isinstance(nodes, dict) else list(nodes)
    if isinstance(prefix, int):
        prefixes = [prefix] * len(children)
    elif isinstance(prefix, dict):
        prefixes = [prefix[k] for k in sorted(prefix)]
    else:
        prefixes = list(prefix)
    pairs = zip(prefixes, children, strict=True)
    return [entry for inner, child in pairs for entry in spread(inner, child)]


@given(st.data(), trees)
def test_broadcast_prefix_walks_both_trees(data: Any, nodes: Any):
    prefix = cut_short(data.draw, nodes)
    assert tree.broadcast_prefix(prefix, nodes, name="prefix") == spread(prefix, nodes)


def test_prefix_leaves_may_be_trees_themselves():
    nodes = {"a": [1, 2], "b": 3}
    assert tree.broadcast_prefix(
        {"a": (1, 2), "b": None},
        nodes,
        name="kinds",
        is_prefix_leaf=lambda x: x is None or isinstance(x, tuple),
    ) == [(1, 2), (1, 2), None]
    spec = {"a": P("x"), "b": Flat()}
    assert tree.broadcast_prefix(spec, nodes, name="specs") == [P("x"), P("x"), Flat()]


@pytest.mark.parametrize(
    ("prefix", "nodes", "where"),
    [
        ({"a": 1}, {"a": 0, "b": 0}, r"b"),
        ({"a": 1, "c": 1}, {"a": 0, "b": 0}, r"c"),
        ({"a": [1]}, {"a": [0, 0]}, r"specs\['a'\]"),
        ({"a": {"b": 1}}, {"a": 0}, r"specs\['a'\]"),
        ({"a": (1, 2)}, {"a": [0, 0]}, r"specs\['a'\]"),
        ({"a": None}, {"a": 0}, r"specs\['a'\]"),
    ],
)
def test_a_mismatch_names_the_place(prefix: Any, nodes: Any, where: str):
    with pytest.raises(TreeMismatchError, match=rf"(?s)^specs is not a prefix.*{where}"):
        tree.broadcast_prefix(prefix, nodes, name="specs")


globs = st.lists(st.sampled_from(["**", "*"]) | st.text("ab*?[!]^", min_size=1), min_size=1)
names = st.lists(st.text("ab!^[]?*", min_size=1), min_size=1, max_size=4)


def oracle(parts: list[str], entries: list[str]) -> bool:
    """Whether a glob matches a path: entry by entry, with the standard library's matcher."""
    if not parts:
        return not entries
    if parts[0] == "**":
        return any(oracle(parts[1:], entries[i:]) for i in range(len(entries) + 1))
    head = bool(entries) and fnmatch.fnmatchcase(entries[0], parts[0])
    return head and oracle(parts[1:], entries[1:])


def matches(glob: str, entries: list[str]) -> bool:
    """Whether a glob marks the leaf at a path."""
    nodes: Any = 0
    for key in reversed(entries):
        nodes = {key: nodes}
    try:
        return tree.leaves(tree.mask(nodes, glob)) == [True]
    except TreeMismatchError:
        return False


@given(globs, names)
def test_globs_match_as_file_names_do(parts: list[str], entries: list[str]):
    assert matches("/".join(parts), entries) == oracle(parts, entries)


@given(st.data(), names)
def test_globs_made_from_a_path_match_it(data: Any, entries: list[str]):
    """The test above draws few that match."""
    parts = []
    for key in entries:
        literal = "".join(f"[{c}]" if c in "[?*" else c for c in key)
        parts += data.draw(
            st.sampled_from(
                [[literal], ["*"], ["?" * len(key)], ["**"], [key[0] + "*"]]
                if key[0] not in "[?*"
                else [[literal], ["*"], ["**"]]
            )
        )
    assert oracle(parts, entries)
    assert matches("/".join(parts), entries)


@pytest.mark.parametrize(
    ("glob", "marked"),
    [
        ("head", ["head"]),
        ("blocks/0/w", ["blocks/0/w"]),
        ("blocks/*/w", ["blocks/0/w", "blocks/1/w"]),
        ("blocks/**", ["blocks/0/b", "blocks/0/w", "blocks/1/b", "blocks/1/w"]),
        ("**/w", ["blocks/0/w", "blocks/1/w"]),
        ("**", ["blocks/0/b", "blocks/0/w", "blocks/1/b", "blocks/1/w", "head"]),
        ("**/**/[!w]", ["blocks/0/b", "blocks/1/b"]),
        ("blocks/[!0]/?", ["blocks/1/b", "blocks/1/w"]),
    ],
)
def test_masks(glob: str, marked: list[str]):
    mask = tree.mask(TREE, glob)
    assert tree.structure(mask) == tree.structure(TREE)
    found = zip(tree.leaf_paths(TREE, ""), tree.leaves(mask), strict=True)
    assert [
        path.replace("['", "/").replace("']", "").replace("[", "/").replace("]", "")[1:]
        for path, mark in found
        if mark
    ] == marked


@pytest.mark.parametrize("glob", ["blocks", "blocks/*", "*/w", "blocks?0?w", "blocks[!x]0/w", "h"])
def test_globs_that_match_no_leaf_are_refused(glob: str):
    with pytest.raises(TreeMismatchError, match="matches no leaf"):
        tree.mask(TREE, glob)


def test_labels_take_the_first_glob_that_matches():
    labels = tree.label(TREE, {"blocks/0/**": "cold", "**/w": "warm", "**": "hot"})
    assert labels == {
        "blocks": [{"w": "cold", "b": "cold"}, {"w": "warm", "b": "hot"}],
        "head": "hot",
    }


def test_a_leaf_without_a_label_is_refused():
    with pytest.raises(TreeMismatchError, match=r"leaf 'head' matches no glob"):
        tree.label(TREE, {"blocks/**": 1})


def test_trees_without_leaves_have_no_labels():
    assert tree.label({"a": None, "b": []}, {"head": 1}) == {"a": None, "b": []}


def test_a_sharded_leaf_is_named_as_one():
    layout = Layout((4,), P(), abstract_mesh({"shard": 2}), "params['h']['w']")
    nodes = {"h": {"w": Sharded(torch.zeros(4), layout)}}
    assert tree.mask(nodes, "h/w") == {"h": {"w": True}}
    assert tree.leaf_paths(nodes, is_leaf=is_sharded) == ["params['h']['w']"]
    assert tree.leaf_paths(nodes) == ["params['h']['w'].local"]
