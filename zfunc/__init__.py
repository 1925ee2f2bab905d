"""zfunc: ZeRO-3 as a function transformation for PyTorch.

`step = zfunc.shard(loss_fn, mesh)` turns a pure loss into a pure training step whose parameters,
gradients and optimizer state are sharded pytrees. Read `program/ir.py` (what a step is made of),
`passes/` (how it is planned) and `execute/executor.py` (how it runs) first.
"""

from zfunc import checkpoint, compress, data, errors, optim, random, report, schedules, tree
from zfunc.adapters import lora
from zfunc.collective import gather, scatter
from zfunc.comm import local_mesh, mesh
from zfunc.errors import (
    BudgetError,
    CaptureError,
    DonatedStateError,
    LayoutError,
    NonFiniteError,
    ProgramMismatchError,
    RankLostError,
    RemoteRankError,
    TreeMismatchError,
)
from zfunc.hardware import Hardware
from zfunc.layout import DEVICE, Flat, P, ShapeDtype, zero
from zfunc.lowered import Lowered
from zfunc.meshes import Mesh, abstract_mesh
from zfunc.modules import module
from zfunc.precision import Precision
from zfunc.rematerialise import name, policies, remat
from zfunc.scaling import LossScale
from zfunc.settings import Capture, Prefetch
from zfunc.sharded import Sharded
from zfunc.spmd import Forward, infer, spmd
from zfunc.state import State
from zfunc.step import Step, shard
from zfunc.tiling import tiled

__all__ = [
    "DEVICE",
    "BudgetError",
    "Capture",
    "CaptureError",
    "DonatedStateError",
    "Flat",
    "Forward",
    "Hardware",
    "LayoutError",
    "LossScale",
    "Lowered",
    "Mesh",
    "NonFiniteError",
    "P",
    "Precision",
    "Prefetch",
    "ProgramMismatchError",
    "RankLostError",
    "RemoteRankError",
    "ShapeDtype",
    "Sharded",
    "State",
    "Step",
    "TreeMismatchError",
    "abstract_mesh",
    "checkpoint",
    "compress",
    "data",
    "errors",
    "gather",
    "infer",
    "local_mesh",
    "lora",
    "mesh",
    "module",
    "name",
    "optim",
    "policies",
    "random",
    "remat",
    "report",
    "scatter",
    "schedules",
    "shard",
    "spmd",
    "tiled",
    "tree",
    "zero",
]
