"""Every case on virtual ranks and on processes: what one dense process computes, on every rank."""

from __future__ import annotations

import pytest

from tests.harness import checked, ranks, tight
from tests.hostile import (
    autograd,
    batches,
    control,
    layouts,
    randomness,
    trees,
    updates,
)
from tests.hostile.case import Case, cases_of, compare, perform
from tests.ranks import run_ranks

MODULES = (trees, layouts, control, autograd, randomness, batches, updates)
CASES = [
    pytest.param(module.__name__, name, this, id=f"{module.__name__.split('.')[-1]}.{name}")
    for module in MODULES
    for name, this in cases_of(module).items()
]
AXES = {1: {"shard": 1}, 2: {"shard": 2}, 3: {"shard": 3}, 4: {"replica": 2, "shard": 2}}
# The smallest budget on three ranks; the checker after every pass on two.
PLANS = {1: None, 2: checked(), 3: tight(0.0, bucket_bytes=0), 4: None}


@pytest.mark.parametrize(("module", "name", "this"), CASES)
def test_virtual_ranks(module: str, name: str, this: Case) -> None:
    for world in this.worlds:
        plan = PLANS[world] if this.checked else None
        compare(this, ranks(AXES[world], perform, module, name, plan), AXES[world])


@pytest.mark.parametrize(("module", "name", "this"), CASES)
def test_processes(module: str, name: str, this: Case) -> None:
    for world in this.worlds:
        axes = AXES[world]
        compare(this, run_ranks(world, perform, module, name, axes=axes), axes)
