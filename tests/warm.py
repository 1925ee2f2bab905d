"""Imported once by the server that ranks are forked from: it captures, so that they need not load.

torch loads some hundred modules when it traces for the first time, which takes seconds.
"""

from __future__ import annotations

import torch

import zfunc
from zfunc import optim

__all__: list[str] = []

torch.set_num_threads(1)
_STEP = zfunc.shard(lambda p, b: (p["w"] * b).sum(), zfunc.abstract_mesh({"shard": 2}))
_STEP.lower(_STEP.abstract({"w": torch.ones(2)}, optim.sgd(0.1)), torch.ones(2))
