"""Settings of every test: one torch thread, hypothesis profiles, the end of the rank pool."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

from tests.ranks import rank_pool

__all__ = ["rank_pool"]

torch.set_num_threads(1)

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, database=None)
settings.register_profile("soak", max_examples=10_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))
