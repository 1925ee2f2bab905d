"""State: everything that a training run is, as one frozen value.

`step(state, batch)` takes a state and returns the next one; skip, rollback and resume are choices
of which value to keep. A state is a tree: the optimizer and the layouts are static, the rest are
tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as torch_pytree

from zfunc.tree import register_node

__all__ = ["State"]


@dataclasses.dataclass(frozen=True)
class State:
    """A frozen tree of a training run's values.

    Attributes:
        step: int64 [], how many times a step was called on it.
        params: the parameters, `Sharded` leaves.
        opt_state: what the optimizer keeps, `Sharded` leaves.
        key: int64 [2], the key that losses draw from, or None.
        scaler: the state of loss scaling, or None.
        tx: the optimizer (static).
    """

    step: Tensor
    params: Any
    opt_state: Any
    key: Tensor | None
    scaler: Any
    tx: Any
    # What the step that made this state knows of it; a rebuilt state does without.
    memo: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return State, (*_children(self), self.tx)


_FIELDS = ("step", "params", "opt_state", "key", "scaler")


def _children(state: State) -> tuple[Any, ...]:
    return tuple(getattr(state, field) for field in _FIELDS)


def _rebuilt(children: Iterable[Any], tx: Any) -> State:
    step, params, opt_state, key, scaler = children
    return State(step, params, opt_state, key, scaler, tx)


register_node(
    State,
    lambda state: (_children(state), state.tx, _FIELDS),
    lambda tx, children: _rebuilt(children, tx),
)
torch_pytree.register_pytree_node(
    State,
    lambda state: (list(_children(state)), state.tx),
    _rebuilt,
    serialized_type_name="zfunc.State",
)
