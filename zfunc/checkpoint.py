"""Checkpoints: whole leaves in files, read one after the other as they are cut.

`load_safetensors` reads only the headers; its leaves are promises that `Step.init` keeps one at a
time, so no rank ever holds more than its shards and one leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optree
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zfunc import tree
from zfunc.errors import TreeMismatchError, explain
from zfunc.layout import ShapeDtype

__all__ = ["Stored", "load_safetensors", "read", "shapes_of"]

_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A leaf in a file.

    Attributes:
        file: a safetensors file.
        name: the leaf's name in it.
        spec: its shape, and the dtype that it is read as.
    """

    file: Path
    name: str
    spec: ShapeDtype

    def read(self) -> Tensor:
        """The whole leaf; in the file's dtype it is mapped memory of the file."""
        with safe_open(self.file, framework="pt") as opened:  # pyright: ignore
            return opened.get_tensor(self.name).to(self.spec.dtype)


def shapes_of(params: Any) -> Any:
    """The tree with a `ShapeDtype` in place of every leaf that is in a file."""
    return tree.map(lambda leaf: leaf.spec if isinstance(leaf, Stored) else leaf, params)


def read(leaf: Any) -> Any:
    """The leaf itself, or what the file has."""
    return leaf.read() if isinstance(leaf, Stored) else leaf


def load_safetensors(
    path: str | Path,
    like: Any,
    *,
    names: Mapping[str, str | Sequence[str]] | None = None,
    strict: bool = True,
) -> Any:
    """Finds the leaves of a tree in safetensors files, for `Step.init` to read one by one.

    Args:
        path: a file, or a folder whose `*.safetensors` are read together.
        like: a tree of tensors, on the meta device or not, or of `ShapeDtype`, as `zfunc.module`
            returns it: what shapes to expect. A leaf is read as its dtype.
        names: by a leaf's path ("params/wte.weight") its name in the files, or several names of
            which one must be there, or none for a leaf that keeps its value; by default the last
            entry of the path ("wte.weight"). A module's are `apply_fn.names`.
        strict: whether names in the files that no leaf has are an error.

    Returns:
        The tree with a `Stored` in place of every tensor.

    Raises:
        FileNotFoundError: there is no such file, or none in the folder.
        ValueError: a file is no safetensors file, or two have the same name.
        TreeMismatchError: a leaf is missing, a name is unexpected, a shape differs.

    Example:
        >>> import tempfile, torch, zfunc, safetensors.torch
        >>> net, folder = torch.nn.Linear(3, 2), tempfile.TemporaryDirectory()
        >>> safetensors.torch.save_file(net.state_dict(), folder.name + "/model.safetensors")
        >>> apply_fn, params = zfunc.module(lambda: torch.nn.Linear(3, 2))
        >>> step = zfunc.shard(lambda p, x: apply_fn(p, x).sum(), zfunc.mesh())
        >>> state = step.init(load_safetensors(folder.name, params), zfunc.optim.sgd(0.1))
        >>> torch.equal(zfunc.gather(state.params)["params"]["weight"], net.weight)
        True
        >>> folder.cleanup()
    """
    found = _index(Path(path))
    paths, leaves, structure = optree.tree_flatten_with_path(like, namespace=tree.NAMESPACE)
    made, missing, known = list(leaves), [], set()
    for place, (entries, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if not isinstance(leaf, Tensor | ShapeDtype):
            continue
        spelled = tree.glob_path(entries)
        options = (names or {}).get(spelled, str(entries[-1]) if entries else "")
        options = (options,) if isinstance(options, str) else tuple(options)
        known.update(options)
        chosen = next((name for name in options if name in found), None)
        if chosen is not None:
            made[place] = _stored(leaf, chosen, spelled, found[chosen])
        elif options:
            missing.append(spelled)
    unexpected = sorted(set(found) - known) if strict else []
    if missing or unexpected:
        raise TreeMismatchError(
            explain(
                f"the files at {path} do not have the leaves of the tree",
                expected=f"every leaf; missing: {_some(missing)}",
                got=f"names that no leaf has: {_some(unexpected)}",
                do="give names={path: name}; strict=False passes over names that no leaf has",
            )
        )
    return tree.unflatten(structure, made)


def _index(path: Path) -> dict[str, Path]:
    """In which file each name is."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise FileNotFoundError(f"{path}: no such file, or no *.safetensors in the folder")
    found: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:  # pyright: ignore
                keys = list(opened.keys())
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
        for name in keys:
            if name in found:
                raise ValueError(f"{name} is in two files, {found[name]} and {file}")
            found[name] = file
    return found


def _stored(leaf: Any, name: str, path: str, file: Path) -> Stored:
    with safe_open(file, framework="pt") as opened:  # pyright: ignore
        shape = tuple(opened.get_slice(name).get_shape())
    if shape != tuple(leaf.shape):
        raise TreeMismatchError(
            explain(
                f"{path} has another shape in {file}",
                expected=list(leaf.shape),
                got=list(shape),
                do="check that the file is of this model",
            )
        )
    return Stored(file, name, ShapeDtype(shape, leaf.dtype))


def _some(names: Sequence[str]) -> str:
    """A list of names, cut where it gets long."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more if names else "none"
