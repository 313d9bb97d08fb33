"""Hugging Face's configuration files: ``config.json`` and ``generation_config.json`` as a description, and the tokenizer's files.

Names and defaults: https://huggingface.co/docs/transformers/model_doc/llama and model_doc/mistral.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fitment.description import ModelDescription, RopeScaling, TokenizerSource
from fitment.formats._fields import MAX_POSITION, MAX_VOCAB, Fields, describe, scaling
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
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
_NEUTRAL: dict[str, tuple[object, ...]] = {"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu", "swish")}
"""Keys that change the result and have no place in the description, with the values (besides null) that change nothing.

Keys that ``LlamaConfig`` and ``MistralConfig`` do not know change nothing either.
"""

_WINDOWED_BY_DEFAULT = {"mistral": 4096}
"""Architectures whose window is on when the configuration says nothing of it."""

_NOT_WINDOWED = ("llama",)
"""Architectures that ignore ``sliding_window``."""

_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", "truncate")
"""What ``rope_parameters`` holds beside the numbers of a scaling."""


def describe_huggingface(directory: Path, problems: list[str]) -> ModelDescription:
    """The model of ``config.json`` (and the end-of-sequence ids of ``generation_config.json``) in ``directory``.

    What is wrong is appended to ``problems``, and its place filled with a bound.

    Raises:
        CheckpointError: a file is missing, too large or no JSON object.
    """
    config = read_json(directory / "config.json", MAX_CONFIG_BYTES)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path, MAX_CONFIG_BYTES) if generation_path.exists() else {}
    return replace(_describe(config, generation, problems), name=Path(os.path.abspath(directory)).name)


def tokenizer_source(directory: Path) -> TokenizerSource:
    """The tokenizer's files that there are in ``directory``."""
    return TokenizerSource("hf", files={name: str(directory / name) for name in TOKENIZER_FILES if (directory / name).is_file()})


def _describe(config: Mapping[str, Any], generation: Mapping[str, Any], problems: list[str]) -> ModelDescription:
    architecture = Fields(config, problems).text("model_type").lower()
    unserved = _unserved(config)
    rope = _rope(config, problems)
    rope_scaling = _rope_scaling(rope, problems, unserved)
    own = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}
    fields = Fields({**config, **own}, problems)
    model = describe(fields, _KEYS, architecture=architecture, defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0},
                     rotary_fraction=fields.number("partial_rotary_factor", 0, 1, 1.0), rope_scaling=rope_scaling,
                     tie_embeddings=fields.flag("tie_word_embeddings", False), sliding_window=_window(fields, architecture))
    vocab_size = model.vocab_size if fields.is_good("vocab_size") else MAX_VOCAB
    begin = fields.token_ids("bos_token_id", vocab_size)
    ends = fields.token_ids("eos_token_id", vocab_size) + Fields(generation, problems).token_ids("eos_token_id", vocab_size)
    return replace(model, bos_token_id=begin[0] if begin else None, eos_token_ids=tuple(dict.fromkeys(ends)), unserved=tuple(unserved))


def _window(fields: Fields, architecture: str) -> int | None:
    if architecture in _NOT_WINDOWED:
        return None
    default = 0 if "sliding_window" in fields.values else _WINDOWED_BY_DEFAULT.get(architecture, 0)
    return fields.integer("sliding_window", 1, MAX_POSITION, default) or None


def _rope(config: Mapping[str, Any], problems: list[str]) -> Mapping[str, Any]:
    """``rope_parameters`` (transformers 5, with theta among them) or ``rope_scaling`` (before), whichever is there."""
    found = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None}
    wrong = [f"{key} is {shown(value)}, wanted an object or null" for key, value in found.items() if not isinstance(value, dict)]
    if not wrong and len({shown(dict(sorted(value.items())), 1000) for value in found.values()}) > 1:
        wrong = ["rope_parameters and rope_scaling are both there and differ, wanted one of them"]
    problems += wrong
    return {} if wrong else next(iter(found.values()), {})


def _rope_scaling(rope: Mapping[str, Any], problems: list[str], unserved: list[str]) -> RopeScaling | None:
    if any(isinstance(value, dict) for value in rope.values()):
        unserved.append(f"rope_parameters = {shown(dict(rope))}")  # one set for each kind of layer
        return None
    kind = Fields(rope, problems).text("rope_type" if rope.get("rope_type") is not None else "type", "default")
    if kind == "default":
        return None
    fields = Fields(rope, problems)
    lists = [name for name, value in rope.items() if isinstance(value, list)]  # a number for each frequency
    unserved += [f"rope_scaling.{name} = {shown(rope[name])}" for name in lists]
    found = scaling(fields, kind, {name: name for name in rope if name not in (*_ROPE, *lists)})
    flags = {} if rope.get("truncate") is None else {"truncate": float(fields.flag("truncate", True))}
    return replace(found, parameters={**found.parameters, **flags})


def _unserved(config: Mapping[str, Any]) -> list[str]:
    """What ``config`` asks for that has no place in the description, as ``key = value``."""
    unserved = [f"{key} = {shown(config[key])}" for key, neutral in _NEUTRAL.items()
                if config.get(key) is not None and config[key] not in neutral]
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        unserved.append(f"quantization_config.quant_method = {shown(method)}")
    classes = config.get("architectures")
    if classes and not (isinstance(classes, list) and any(isinstance(name, str) and name.endswith("ForCausalLM") for name in classes)):
        unserved.append(f"architectures = {shown(classes)}")
    return unserved
