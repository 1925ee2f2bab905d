"""Policies: what a rematerialised call keeps of what it makes, as values."""

from __future__ import annotations

import dataclasses

from zfunc.errors import check_count, explain

__all__ = ["Budget", "Matmuls", "Names", "Nothing", "Policy"]


@dataclasses.dataclass(frozen=True, slots=True)
class Nothing:
    """Keep nothing that a call makes but what it returns."""


@dataclasses.dataclass(frozen=True, slots=True)
class Matmuls:
    """Keep the results of matrix products, convolutions and attention."""


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """Keep what `name` gave one of some names.

    Attributes:
        names: the names.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names or not all(isinstance(name, str) for name in self.names):
            raise ValueError(
                explain("policies.names", expected="one or more strings", got=self.names)
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Keep so many bytes at most, and of all such choices the one that costs least time.

    Attributes:
        nbytes: the most bytes that one call keeps besides what it returns.
    """

    nbytes: int

    def __post_init__(self) -> None:
        check_count("policies.budget()", self.nbytes, 0, "bytes")


Policy = Nothing | Matmuls | Names | Budget
