"""Smaller models, as pure transforms of the parameter tree: fake quantisation and pruning.

A rule is a frozen function of one leaf; `transform` applies rules by path, inside of a loss, so
that training sees what the packed model will compute; `pack` exports the result.
"""

from zfunc.compress.pack import Numbers, Sparse, pack, unpack
from zfunc.compress.prune import Heads, Magnitude, Movement, Rows, scores_like
from zfunc.compress.quantise import FakeQuantise
from zfunc.compress.rules import transform

__all__ = [
    "FakeQuantise",
    "Heads",
    "Magnitude",
    "Movement",
    "Numbers",
    "Rows",
    "Sparse",
    "pack",
    "scores_like",
    "transform",
    "unpack",
]
