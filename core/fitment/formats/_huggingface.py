"""Hugging Face's configuration files: ``config.json`` and ``generation_config.json`` as a description, and the tokenizer's files.

Names and defaults: https://huggingface.co/docs/transformers/model_doc/llama and model_doc/mistral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fitment.description import ModelDescription, RopeScaling, TokenizerSource
from fitment.formats._fields import MAX_POSITION, MAX_VOCAB, Fields, describe
from fitment.formats._files import read_json, shown

MAX_CONFIG_BYTES = 16 << 20

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json")

_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "vocab_size": "vocab_size",
    "max_position": "max_position_embeddings",
    "rotary_size": "rotary_dim",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "is_encoder_decoder": (False,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "n_routed_experts": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "alibi": (False,),
    "no_rope_layers": (),
    "no_rope_layer_interval": (0,),
    "attention_chunk_size": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "kv_lora_rank": (0,),
    "text_config": (),
    "vision_config": (),
    "audio_config": (),
}
"""Keys that change the result and have no place in the description, with the values (besides null) that change nothing."""

_WINDOWED_BY_DEFAULT = {"mistral": 4096}
"""Architectures whose window is on when the configuration says nothing of it."""

_NOT_WINDOWED = ("llama",)
"""Architectures that ignore ``sliding_window``."""


def describe_huggingface(directory: Path, problems: list[str]) -> ModelDescription:
    """The model of ``config.json`` (and the end-of-sequence ids of ``generation_config.json``) in ``directory``.

    What is wrong is appended to ``problems``; the result is then not to be used.

    Raises:
        CheckpointError: a file is missing, too large or no JSON object.
    """
    config = read_json(directory / "config.json", MAX_CONFIG_BYTES)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path, MAX_CONFIG_BYTES) if generation_path.exists() else {}
    return replace(describe_config(config, generation, problems), name=directory.resolve().name)


def describe_config(config: Mapping[str, Any], generation: Mapping[str, Any], problems: list[str]) -> ModelDescription:
    """The model of a configuration; what is wrong is appended to ``problems`` and the result is then not to be used."""
    fields = Fields(config, problems)
    architecture = fields.text("model_type").lower()
    rope = _rope_values(config, problems)
    unserved = _unserved(config)
    scaling = _rope_scaling(rope, problems, unserved)
    fraction = Fields({**config, **rope}, problems).number("partial_rotary_factor", 0, 1, 1.0)
    fields.values = {**config, "rope_theta": rope["rope_theta"]} if rope.get("rope_theta") is not None else config
    model = describe(fields, _KEYS, architecture=architecture, defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0},
                     rotary_fraction=fraction, rope_scaling=scaling, tie_embeddings=fields.flag("tie_word_embeddings", False),
                     sliding_window=_window(fields, architecture))
    vocab_size = model.vocab_size if fields.is_good("vocab_size") else MAX_VOCAB
    begin = fields.token_ids("bos_token_id", vocab_size)
    ends = fields.token_ids("eos_token_id", vocab_size) + Fields(generation, problems).token_ids("eos_token_id", vocab_size)
    return replace(model, bos_token_id=begin[0] if begin else None, eos_token_ids=tuple(dict.fromkeys(ends)), unserved=tuple(unserved))


def tokenizer_source(directory: Path) -> TokenizerSource:
    """The tokenizer's files that there are in ``directory``."""
    return TokenizerSource("hf", files={name: str(directory / name) for name in TOKENIZER_FILES if (directory / name).is_file()})


def _window(fields: Fields, architecture: str) -> int | None:
    if architecture in _NOT_WINDOWED or not fields.flag("use_sliding_window", True):
        return None
    default = 0 if "sliding_window" in fields.values else _WINDOWED_BY_DEFAULT.get(architecture, 0)
    return fields.integer("sliding_window", 1, MAX_POSITION, default) or None


def _rope_values(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """``rope_parameters`` (transformers 5) or ``rope_scaling`` (before), whichever is there."""
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, dict):
            return value
        problems.append(f"{key} is {shown(value)}, wanted an object or null")
    return {}


def _rope_scaling(rope: Mapping[str, Any], problems: list[str], unserved: list[str]) -> RopeScaling | None:
    fields = Fields(rope, problems)
    if any(isinstance(value, dict) for value in rope.values()):
        unserved.append(f"rope_parameters = {shown(dict(rope))}")  # one set for each kind of layer
        return None
    kind = fields.text("rope_type" if rope.get("rope_type") is not None else "type", "default")
    if kind == "default":
        return None
    parameters = {}
    for name in rope:
        if name in ("rope_type", "type", "rope_theta", "partial_rotary_factor") or rope[name] is None:
            continue
        if isinstance(rope[name], (int, float)) and not isinstance(rope[name], bool):
            parameters[name] = fields.number(name, 0 if name == "factor" else -1e12, 1e12)
        else:
            unserved.append(f"rope_scaling.{name} = {shown(rope[name])}")
    if kind in ("linear", "dynamic", "yarn", "llama3") and "factor" not in parameters:
        problems.append(f"rope_scaling has the type {kind!r} and no factor")
    return RopeScaling(kind, parameters)


def _unserved(config: Mapping[str, Any]) -> list[str]:
    """What ``config`` asks for that has no place in the description, as ``key = value``."""
    unserved = [f"{key} = {shown(config[key])}" for key, neutral in _NEUTRAL.items()
                if config.get(key) is not None and config[key] not in neutral]
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        unserved.append(f"quantization_config.quant_method = {shown(method)}")
    layer_types = config.get("layer_types")
    if layer_types is not None and (not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)):
        unserved.append(f"layer_types = {shown(layer_types)}")
    classes = config.get("architectures")
    if classes and not (isinstance(classes, list) and any(isinstance(name, str) and name.endswith("ForCausalLM") for name in classes)):
        unserved.append(f"architectures = {shown(classes)}")
    return unserved
