"""State: everything that a training run is, as one frozen value.

`step(state, batch)` takes a state and returns the next one; skip, rollback and resume are choices
of which value to keep. A state is a tree: the optimizer and the layouts are static, the rest are
tensors.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as torch_pytree

from zfunc.errors import LayoutError, explain
from zfunc.tree import register_node

__all__ = ["Memo", "State", "check_state"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Memo:
    """What a step knows of a state that it made, as long as nobody has changed the state.

    Attributes:
        training: the step.
        table: describes the parameters.
        leaves: their `Sharded` leaves.
        flat: all their leaves.
        structure: of their tree.
        opt_state: the optimizer's state.
        tx: the optimizer.
        skips: how many steps in a row were left out before.
    """

    training: Any
    table: Any
    leaves: list[Any]
    flat: list[Any]
    structure: Any
    opt_state: Any
    tx: Any
    skips: int

    def fits(self, training: Any, state: State, flat: list[Any], structure: Any) -> bool:
        """Whether a state is still what that step made of it."""
        same = self.training is training and self.opt_state is state.opt_state
        same = same and self.tx is state.tx and self.structure == structure
        return same and len(flat) == len(self.flat) and all(map(operator.is_, flat, self.flat))


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
    memo: Memo | None = dataclasses.field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return State, (*_children(self), self.tx)


def check_state(state: Any) -> None:
    """Raises `LayoutError` for anything that is no state."""
    if not isinstance(state, State):
        raise LayoutError(
            explain(
                "a step takes a state and a batch",
                expected="what init, adopt or the last call returned",
                got=type(state),
            )
        )


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
