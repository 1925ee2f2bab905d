"""Models of the transformers library with random weights: small, one of each family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers

__all__ = ["FAMILIES", "Family"]

VOCABULARY = 50
NO_DROPOUT = [
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "hidden_dropout", "attention_dropout", "activation_dropout",
    "feat_proj_dropout", "final_dropout", "layerdrop", "mask_time_prob",
    "classifier_dropout_prob", "dropout_rate",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """How to make a model and a batch.

    Attributes:
        model: the class.
        config: the class of its configuration.
        options: what makes it small.
        draw: `draw(generator)` makes what the model takes by name.
        rung: where its loss runs.
        checkpoints: whether it can compute its blocks again.
        ties: names that are one leaf, the leaf's first.
    """

    model: Any
    config: Any
    options: dict[str, Any]
    draw: Callable[[torch.Generator], dict[str, Any]]
    rung: str = "traced"
    checkpoints: bool = True
    ties: tuple[str, ...] = ()

    def make(self, *, training: bool = False) -> Any:
        """A model in float64, without dropout."""
        config = self.config(**self.options)
        for name in NO_DROPOUT:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        torch.manual_seed(0)
        return self.model(config).double().train(training)

    def batch(self, seed: int) -> dict[str, Any]:
        return self.draw(torch.Generator().manual_seed(seed))


def tokens(generator: torch.Generator, length: int = 9) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (2, length), generator=generator)


def text(generator: torch.Generator) -> dict[str, Any]:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def pairs(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": tokens(generator), "labels": tokens(generator, 5)}


def images(generator: torch.Generator) -> dict[str, Any]:
    pixels = torch.randn(2, 3, 16, 16, generator=generator).double()
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (2,), generator=generator)}


def speech(generator: torch.Generator) -> dict[str, Any]:
    samples = torch.randn(2, 400, generator=generator).double()
    return {"input_values": samples, "labels": torch.randint(1, 12, (2, 4), generator=generator)}


NARROW = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
READS = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
GROUPED = NARROW | READS | {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "gpt2": Family(
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        | {"bos_token_id": 0, "eos_token_id": 1},
        text,
        ties=("transformer.wte.weight", "lm_head.weight"),
    ),
    "llama": Family(
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        GROUPED | {"intermediate_size": 32},
        text,
    ),
    "mixtral": Family(
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        GROUPED
        | {"intermediate_size": 32, "num_local_experts": 4, "experts_implementation": "eager"},
        text,
        rung="dynamic",
    ),
    "t5": Family(
        transformers.T5ForConditionalGeneration,
        transformers.T5Config,
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
        | {"num_heads": 2, "decoder_start_token_id": 0},
        pairs,
        ties=(
            "shared.weight",
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",
        ),
    ),
    "bert": Family(
        transformers.BertForMaskedLM,
        transformers.BertConfig,
        NARROW | READS | {"intermediate_size": 32},
        text,
    ),
    "albert": Family(
        transformers.AlbertForMaskedLM,
        transformers.AlbertConfig,
        NARROW | READS | {"intermediate_size": 32, "embedding_size": 8, "num_hidden_layers": 4},
        text,
        checkpoints=False,
    ),
    "vit": Family(
        transformers.ViTForImageClassification,
        transformers.ViTConfig,
        NARROW | {"intermediate_size": 32, "image_size": 16, "patch_size": 4, "num_labels": 5},
        images,
    ),
    "mamba": Family(
        transformers.MambaForCausalLM,
        transformers.MambaConfig,
        {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
        text,
    ),
    "wav2vec2": Family(
        transformers.Wav2Vec2ForCTC,
        transformers.Wav2Vec2Config,
        NARROW
        | {"vocab_size": 12, "intermediate_size": 32, "num_feat_extract_layers": 2}
        | {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4)}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        speech,
        rung="dynamic",
    ),
}
