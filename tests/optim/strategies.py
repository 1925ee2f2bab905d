"""Random transforms, parameters and gradients."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from zfunc import optim, schedules

__all__ = ["elementwise", "integers", "shapes", "transforms"]

elementwise = st.sampled_from(
    [
        optim.scale(0.5),
        optim.scale_by_schedule(schedules.linear(1.0, 0.5, 2)),
        optim.scale_by_learning_rate(0.25),
        optim.trace(0.5),
        optim.trace(0.5, nesterov=True),
        optim.scale_by_adam(),
        optim.scale_by_adam(b1=0.5, b2=0.75, eps=0.5),
        optim.add_decayed_weights(0.125),
        optim.add_decayed_weights(
            schedules.linear(1.0, 0.0, 2), lambda path, shape: len(shape) > 1
        ),
        optim.adamw(schedules.wsd(0.5, 1, 1, 1)),
        optim.sgd(0.5, momentum=0.5),
        optim.scale_by_lion(b1=0.5, b2=0.75),
        optim.lion(0.25, weight_decay=0.125),
        optim.scale_by_rss(),
        optim.ema(0.5),
        optim.ema(0.75, debias=False),
        optim.ema_params(0.5),
        optim.multi_steps(optim.sgd(0.5, momentum=0.5), 2),
        optim.multi_steps(optim.adamw(0.5), schedules.linear(1.0, 2.0, 1), use_grad_mean=False),
        optim.inject_hyperparams(optim.adamw)(0.5),
        optim.adagrad(schedules.linear(1.0, 0.5, 2), initial_accumulator_value=0.5),
        optim.identity(),
    ]
)
transforms = st.one_of(elementwise, st.just(optim.clip_by_global_norm(2.0)))

shapes = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    min_size=1,
)


def integers(shape_of: dict[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    """Small integers as float32: sums of their squares are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-4, 5, shape, generator=generator).float()
        for name, shape in sorted(shape_of.items())
    }
