"""Init: from a tree, from a function, with a key; the pieces are those of the whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import zfunc
from tests.harness import assert_equal, gathered, ranks
from zfunc import optim, random, tree
from zfunc.sharded import is_sharded


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return sum((x.float().sum() * batch.sum() for x in tree.leaves(params)), torch.zeros(()))


def whole(world: int | dict[str, int], source: Any, *, key: Any = None, **options: Any) -> Any:
    """The whole leaves of the first state, and its key, of every rank."""

    def run(mesh: zfunc.Mesh) -> Any:
        step = zfunc.shard(loss_fn, mesh, **options)
        state = step.init(source, optim.adamw(0.1), key=key)
        return gathered(state.params), state.key

    return ranks(world, run)


def drawn() -> dict[str, Tensor]:
    return {"a": torch.randn(5, 3), "b": {"c": torch.rand(7), "d": torch.zeros(())}}


def keyed(key: Tensor) -> dict[str, Tensor]:
    first, second = random.split(key)
    return {"a": random.normal(first, (5, 3)), "b": random.uniform(second, (7,))}


def views() -> dict[str, Any]:
    """Leaves that share a buffer, one that is written later, and one that appears twice."""
    base = torch.arange(12.0)
    late = torch.zeros(4)
    result = {"t": base.view(3, 4).t(), "slice": base[2:9:3], "late": late, "same": [base, base]}
    late.add_(1)
    late[2:].mul_(3)
    result["expanded"] = torch.ones(1).expand(3, 2)
    result["static"], result["flag"] = 3, torch.tensor([True, False])
    return result


@pytest.mark.parametrize("world", [1, 2, 3, {"replica": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_function_makes_what_it_would_make_by_itself(world: Any, stage: int) -> None:
    for function in (drawn, views):
        torch.manual_seed(7)
        expected = [x for x in tree.leaves(function()) if isinstance(x, Tensor)]
        torch.manual_seed(7)
        for got, _ in whole(world, function, specs=zfunc.zero(stage)):
            assert_equal(got, expected)


def test_a_function_moves_the_generator_as_it_would_by_itself() -> None:
    def run(mesh: zfunc.Mesh) -> Tensor:
        torch.manual_seed(7)
        zfunc.shard(loss_fn, mesh).init(drawn, optim.sgd(0.1))
        return torch.rand(3)

    torch.manual_seed(7)
    drawn()
    expected = torch.rand(3)
    for got in ranks(2, run):
        assert torch.equal(got, expected)


def test_a_key_is_split_for_the_function_and_the_state() -> None:
    init_key, state_key = random.split(random.key(3))
    expected = tree.leaves(keyed(init_key))
    for world in (1, 2, 3):
        for got, key in whole(world, keyed, key=random.key(3)):
            assert_equal(got, expected)
            assert torch.equal(key, state_key)


def test_a_key_beside_a_tree_or_a_function_without_parameters() -> None:
    _, state_key = random.split(random.key(3))
    for source in ({"a": torch.ones(3)}, lambda: {"a": torch.ones(3)}):
        for got, key in whole(2, source, key=random.key(3)):
            assert torch.equal(got[0], torch.ones(3))
            assert torch.equal(key, state_key)


class Model:
    """Methods that make parameters."""

    def plain(self) -> dict[str, Tensor]:
        return {"a": torch.ones(3)}

    def keyed(self, seed: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        return {"a": random.uniform(seed, (3,)) * scale}

    def named(self, *, key: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        return {"a": random.uniform(key, (3,)) * scale}


def test_methods_partials_and_keyword_arguments() -> None:
    model = Model()
    key, _ = random.split(random.key(3))
    ((got,), _), *_ = whole(2, model.plain)
    assert torch.equal(got, torch.ones(3))
    for function in (model.keyed, model.named, functools.partial(model.named, scale=2.0)):
        ((got,), _), *_ = whole(2, function, key=random.key(3))
        assert torch.equal(got, random.uniform(key, (3,)) * 2)


def test_a_function_that_needs_a_key_says_so() -> None:
    with pytest.raises(zfunc.LayoutError, match=r"(?s)takes a key.*random\.key\(seed\)"):
        whole(2, keyed)


def test_leaves_as_the_caller_laid_them_out() -> None:
    base = torch.arange(24.0)
    nested = torch.arange(48.0).view(1, 2, 4, 6).contiguous(memory_format=torch.channels_last)
    params = {
        "transposed": base.view(4, 6).t(),
        "strided": base[1::5],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "expanded to one": torch.ones(()).expand(1),
        "expanded to none": torch.ones(()).expand(0),
        "channels last": nested,
        "grad": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "empty": torch.ones(0, 3),
        "number": torch.tensor(5.0),
    }
    expected = [x.detach().resolve_conj() for x in tree.leaves(params)]
    for stage in (1, 3):
        for got, _ in whole(3, params, specs=zfunc.zero(stage)):
            assert_equal(got, expected)
            assert not any(x.requires_grad for x in got)


def test_dict_order_does_not_matter() -> None:
    def run(mesh: zfunc.Mesh) -> list[Tensor]:
        names = ["z", "a", "m"] if mesh.rank else ["m", "z", "a"]
        params = {name: torch.full((3,), float(ord(name))) for name in names}
        step = zfunc.shard(loss_fn, mesh)
        state, _ = step(step.init(params, optim.sgd(0.5)), torch.ones(1))
        return gathered(state.params)

    one, other = ranks(2, run)
    assert_equal(one, other)


def test_a_difference_between_ranks_names_the_leaf() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        params = {"w": torch.zeros(3), "h": [torch.ones(2), torch.full((2,), float(mesh.rank))]}
        zfunc.shard(loss_fn, mesh).init(params, optim.sgd(0.1))

    with pytest.raises(
        zfunc.LayoutError, match=r"(?s)params\['h'\]\[1\] differs.*rank 1 has another.*seed every"
    ):
        ranks(2, run)


def test_ranks_that_draw_differently_are_found_out() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        torch.manual_seed(mesh.rank)
        zfunc.shard(loss_fn, mesh).init(drawn, optim.sgd(0.1))

    with pytest.raises(zfunc.LayoutError, match=r"(?s)params\['a'\] differs.*a function of a key"):
        ranks(2, run)


def test_other_shapes_on_one_rank_are_found_out() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        zfunc.shard(loss_fn, mesh).init({"w": torch.ones(3 + mesh.rank)}, optim.sgd(0.1))

    with pytest.raises(zfunc.ProgramMismatchError, match=r"(?s)params\['w'\].*\[3\].*\[4\]"):
        ranks(2, run)


def test_other_settings_on_one_rank_are_found_out() -> None:
    def run(mesh: zfunc.Mesh) -> None:
        zfunc.shard(loss_fn, mesh).init({"w": torch.ones(3)}, optim.sgd(0.1 * (1 + mesh.rank)))

    with pytest.raises(zfunc.ProgramMismatchError, match=r"(?s)different settings.*0\.1.*0\.2"):
        ranks(2, run)


def test_an_exception_in_the_function_of_one_rank_reaches_all() -> None:
    def run(mesh: zfunc.Mesh) -> str:
        def function() -> Any:
            if mesh.rank == 1:
                raise KeyError("no such file")
            return {"w": torch.ones(3)}

        step = zfunc.shard(loss_fn, mesh)
        with pytest.raises((KeyError, zfunc.RemoteRankError)) as caught:
            step.init(function, optim.sgd(0.1))
        step.init({"w": torch.ones(3)}, optim.sgd(0.1))
        return f"{type(caught.value).__name__}: {caught.value}"

    one, other = ranks(2, run)
    assert one.startswith("RemoteRankError: init failed on rank 1: KeyError: 'no such file'")
    assert other == "KeyError: 'no such file'"


class Alive(TorchDispatchMode):
    """Notes the most bytes of the tensors that ops have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in _tensors(out):
            self._storages[x.untyped_storage()] = x.untyped_storage().nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(self._storages.values()))
        return out


def _tensors(out: Any) -> Iterator[Tensor]:
    for x in out if isinstance(out, list | tuple) else [out]:
        if isinstance(x, Tensor) and not isinstance(x, FakeTensor):
            yield x


def test_the_full_model_never_exists_on_one_rank() -> None:
    count, numel = 16, 1000

    def function() -> list[Tensor]:
        return [torch.rand(numel) * i for i in range(count)]

    full_bytes = 4 * count * numel
    step = zfunc.shard(loss_fn, zfunc.abstract_mesh({"shard": 8}))
    with Alive() as alive:
        state = step.init(function, optim.identity())
    shard_bytes = sum(leaf.local.nbytes for leaf in tree.leaves(state.params, is_leaf=is_sharded))
    assert shard_bytes == full_bytes / 8
    assert shard_bytes < alive.peak_bytes < shard_bytes + 4 * 4 * numel
    with Alive() as alive:
        function()
    assert alive.peak_bytes >= full_bytes, "the instrument sees a model that does exist"


def test_leaves_that_are_not_tensors_stay() -> None:
    def run(mesh: zfunc.Mesh) -> Any:
        params = {"w": torch.ones(3), "n": 3, "f": torch.relu, "s": "x", "none": None, "t": (2.5,)}
        step = zfunc.shard(lambda p, b: (p["f"](p["w"]) * p["n"] * b).sum(), mesh)
        state, metrics = step(step.init(params, optim.sgd(0.5)), torch.ones(3))
        kept = {name: state.params[name] for name in ("n", "f", "s", "none", "t")}
        return kept, float(metrics["loss"])

    for kept, loss in ranks(2, run):
        assert kept == {"n": 3, "f": torch.relu, "s": "x", "none": None, "t": (2.5,)}
        assert loss == 9.0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a": {1, 2}, "w": torch.ones(2)}, r"(?s)params\['a'\] is neither a tensor nor hashable"),
        ({"a": 3, "b": None}, r"(?s)no tensor leaf"),
        ({"e": torch.ones(2, 2).to_sparse()}, r"(?s)params\['e'\] is a sparse tensor"),
    ],
    ids=["unhashable", "no tensor", "sparse"],
)
def test_what_cannot_be_a_parameter(params: Any, message: str) -> None:
    step = zfunc.shard(loss_fn, zfunc.mesh())
    with pytest.raises(ValueError, match=message):
        step.init(params, optim.sgd(0.1))


def test_abstract_makes_the_same_structure_without_tensors() -> None:
    for specs in (zfunc.zero(1), zfunc.zero(3)):
        step = zfunc.shard(loss_fn, zfunc.mesh(), specs=specs)
        for source, key in ((drawn, None), (keyed, random.key(0)), (drawn(), None)):
            tx = optim.adamw(0.1)
            like = step.abstract(source, tx, key=key)
            real = step.init(source, tx, key=key)
            assert tree.structure(like) == tree.structure(real)
            for a, b in zip(tree.leaves(like), tree.leaves(real), strict=True):
                assert isinstance(a, zfunc.ShapeDtype)
                assert (a.shape, a.dtype) == (tuple(b.shape), b.dtype)


def test_abstract_of_a_model_that_would_not_fit() -> None:
    numel = 1 << 40
    step = zfunc.shard(loss_fn, zfunc.abstract_mesh({"shard": 1 << 20}))
    state = step.abstract(lambda: {"w": torch.zeros(numel // 1024, 1024)}, optim.adamw(0.1))
    assert state.params["w"].local.shape == (1 << 20,)
    assert math.prod(state.params["w"].shape) == numel
