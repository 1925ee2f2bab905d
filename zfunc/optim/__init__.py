"""Optimizers as values: pure `(init, update)` pairs with optax's names and argument names."""

from zfunc.optim.alias import adagrad, adam, adamw, lamb, lion, sgd
from zfunc.optim.averages import ema, ema_params
from zfunc.optim.base import (
    ChangedInfo,
    LocalInfo,
    Transform,
    UpdateInfo,
    global_norm,
    learning_rate_of,
)
from zfunc.optim.combine import chain, identity, masked, partition
from zfunc.optim.factored import (
    adafactor,
    clip_by_block_rms,
    scale_by_factored_rms,
    scale_by_param_block_rms,
)
from zfunc.optim.inject import inject_hyperparams, set_hyperparams
from zfunc.optim.moments import scale_by_adam, trace
from zfunc.optim.multi import multi_steps
from zfunc.optim.muon import muon, scale_by_muon
from zfunc.optim.running import scale_by_lion, scale_by_rss
from zfunc.optim.transforms import (
    add_decayed_weights,
    clip_by_global_norm,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
)
from zfunc.optim.trust import scale_by_trust_ratio
from zfunc.optim.update import Applied, apply, apply_updates

__all__ = [
    "Applied",
    "ChangedInfo",
    "LocalInfo",
    "Transform",
    "UpdateInfo",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply",
    "apply_updates",
    "chain",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "ema",
    "ema_params",
    "global_norm",
    "identity",
    "inject_hyperparams",
    "lamb",
    "learning_rate_of",
    "lion",
    "masked",
    "multi_steps",
    "muon",
    "partition",
    "scale",
    "scale_by_adam",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_param_block_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "set_hyperparams",
    "sgd",
    "trace",
]
