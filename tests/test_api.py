"""The public API as it is agreed on: who changes a name or an argument changes this file too."""

from __future__ import annotations

import inspect
from typing import Any

import zfunc

NAMES = """
BudgetError Capture CaptureError DEVICE DonatedStateError Flat Forward Hardware LayoutError
LossScale Lowered Mesh NonFiniteError P Precision Prefetch ProgramMismatchError RankLostError
RemoteRankError ShapeDtype Sharded State Step TreeMismatchError abstract_mesh checkpoint compress
data errors gather infer local_mesh lora mesh module name optim policies random remat report scatter
schedules shard spmd tiled tree zero
"""

ARGUMENTS = {
    "mesh": "axes *device *timeout_s",
    "local_mesh": "n_or_axes",
    "abstract_mesh": "axes *hw",
    "zero": "stage axis",
    "Flat": "axis min_numel",
    "Prefetch": "live_bytes ahead_bytes",
    "Capture": "rung check_every max_signatures max_shape_misses",
    "ShapeDtype": "shape dtype",
    "shard": (
        "loss_fn mesh *specs *trainable *precision *remat *prefetch *accum *has_aux *nonfinite"
        " *capture *donate"
    ),
    "spmd": "fn mesh *out_specs *precision *prefetch",
    "infer": "apply_fn mesh *precision *prefetch",
    "gather": "tree dtype",
    "scatter": "tree mesh specs *reduce",
    "remat": "fn policy",
    "name": "x label",
    "policies.names": "names",
    "policies.budget": "nbytes",
    "tiled": "fn dim n *out",
    "Step.init": "params_or_fn tx *key",
    "Step.abstract": "params_or_fn tx *key",
    "Step.__call__": "state batch",
    "Step.value_and_grad": "params batch *key",
    "Step.adopt": "state",
    "Step.lower": "state_like batch_like",
    "Step.explain": "",
    "Lowered.as_text": "*max_lines",
    "Lowered.memory_analysis": "",
    "Lowered.cost_analysis": "",
    "module": "nn_module",
    "compress.transform": "params rules *keep *scores",
    "compress.pack": "params rules *keep *scores",
    "lora": "apply_fn params ranks *key *alpha *base *block",
    "checkpoint.load_safetensors": "path like *names *strict",
    "data.by_tokens": "lengths max_tokens *mesh *key *order *buckets *multiple_of *min_size "
    "*max_size *accum *drop_last *only",
    "optim.adamw": "learning_rate b1 b2 eps weight_decay mask",
    "optim.sgd": "learning_rate momentum *nesterov",
    "optim.clip_by_global_norm": "max_norm",
    "optim.adagrad": "learning_rate initial_accumulator_value eps",
    "optim.lamb": "learning_rate b1 b2 eps weight_decay mask *min_coeff *max_coeff",
    "optim.adafactor": "learning_rate min_dim_size_to_factor decay_rate "
    "multiply_by_parameter_scale clipping_threshold momentum "
    "weight_decay_rate eps factored weight_decay_mask",
    "optim.muon": "learning_rate ns_coeffs ns_steps beta eps weight_decay mask *nesterov *adjust "
    "*ns_dtype *adam_learning_rate *adam_b1 *adam_b2 *adam_eps *adam_weight_decay",
    "optim.lion": "learning_rate b1 b2 weight_decay mask",
    "optim.ema": "decay debias accumulator_dtype",
    "optim.ema_params": "decay accumulator_dtype",
    "optim.inject_hyperparams": "inner_factory static_args",
    "optim.masked": "inner mask",
    "optim.multi_steps": "opt every_k_schedule use_grad_mean",
    "optim.set_hyperparams": "state label hyperparams",
    "optim.partition": "transforms labels",
    "schedules.cosine_with_min": (
        "peak_value warmup_steps decay_steps min_lr min_lr_rate num_cycles"
    ),
    "schedules.lr_range_test": "min_lr step_size step_rate staircase",
    "schedules.one_cycle": (
        "peak_value total_steps pct_start anneal_strategy div_factor final_div_factor three_phase"
    ),
    "schedules.warmup_linear": "peak_value warmup_steps decay_steps init_value end_value",
    "schedules.warmup_ratio": "peak_value ratio total_steps lr_scheduler_type",
}


def lookup(name: str) -> Any:
    found: Any = zfunc
    for part in name.split("."):
        found = getattr(found, part)
    return found


def spelled(function: Any) -> str:
    """The arguments of a function; those that only a keyword can give have a star."""
    parameters = inspect.signature(function).parameters.values()
    return " ".join(
        ("*" if parameter.kind is parameter.KEYWORD_ONLY else "") + parameter.name
        for parameter in parameters
        if parameter.name != "self"
    )


def test_the_public_names_are_these() -> None:
    assert sorted(zfunc.__all__) == sorted(NAMES.split())
    assert all(hasattr(zfunc, name) for name in zfunc.__all__)


def test_every_public_function_takes_these_arguments() -> None:
    assert {name: spelled(lookup(name)) for name in ARGUMENTS} == ARGUMENTS


def test_a_state_is_these_values() -> None:
    fields = [field for field in zfunc.State.__dataclass_fields__ if field != "memo"]
    assert fields == ["step", "params", "opt_state", "key", "scaler", "tx"]


def test_every_public_function_is_documented() -> None:
    for name in zfunc.__all__:
        thing = getattr(zfunc, name)
        assert inspect.getdoc(thing) or not callable(thing), name
