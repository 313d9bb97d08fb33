"""What GGUF calls things: tensor names and metadata keys, and the model that they describe.

Source: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py and tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fitment.description import ModelDescription, RopeScaling
from fitment.formats._fields import KEYS, MAX_POSITION, MAX_VOCAB, Fields, describe, scaling
from fitment.formats._files import shown
from fitment.formats._gguf_reader import Metadata

ROPE_FACTORS = "rope_freqs.weight"
"""What the inverse rotary frequencies are divided by (fp32 ``[rotary_size / 2]``); how GGUF stores llama3 scaling."""

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")

_KEYS = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_size": "attention.key_length",
    "vocab_size": "vocab_size",
    "max_position": "context_length",
    "rotary_size": "rope.dimension_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
assert tuple(sorted(_KEYS)) == tuple(sorted(KEYS))

_SCALING = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_LINEAR = "rope.scale_linear"
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.scale": 0,
    "embedding_scale": 1,
    "residual_scale": 1,
    "logit_scale": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
}
"""Values with which a key changes nothing; for keys that are not here, zero (off) does."""

_IGNORED = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})
"""Keys that say where a file comes from and change no result."""


def huggingface_name(name: str) -> str:
    """Hugging Face's name for a GGUF tensor; names that have none stay as they are."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{suffix}"
    match = _LAYER.fullmatch(name)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    return name


def describe_gguf(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], problems: list[str]) -> ModelDescription:
    """The model that ``metadata`` describes; ``unserved`` has what it asks for without a place in the description.

    ``shapes`` has the tensors by Hugging Face's names. What is wrong is appended to ``problems``, and its place filled with a bound.
    """
    fields = Fields(Scalars(metadata), problems)
    architecture = fields.text("general.architecture")
    if (kind := fields.text("general.type", "model")) != "model":
        problems.append(f"general.type is {kind!r}, wanted 'model': an adapter or projector is no model by itself")
    keys = {field: f"{architecture}.{key}" for field, key in _KEYS.items()}
    window = fields.integer(f"{architecture}.attention.sliding_window", 0, MAX_POSITION, 0)
    rope_scaling = _rope_scaling(fields, architecture, ROPE_FACTORS in shapes)
    fields.values = Scalars(metadata, {keys["vocab_size"]: _vocab_size(metadata, shapes)})
    model = describe(fields, keys, architecture=architecture, rope_scaling=rope_scaling, sliding_window=window or None,
                     tie_embeddings="lm_head.weight" not in shapes, name=_name(metadata), defaults={"rope_theta": 10000.0})
    vocab_size = model.vocab_size if fields.is_good(keys["vocab_size"]) else MAX_VOCAB
    _check_vocabulary(metadata, keys["vocab_size"], vocab_size, problems)
    begin = fields.token_ids("tokenizer.ggml.bos_token_id", vocab_size)
    ends = [end for key in ("eos", "eot", "eom") for end in fields.token_ids(f"tokenizer.ggml.{key}_token_id", vocab_size)]
    return replace(model, bos_token_id=begin[0] if begin else None, eos_token_ids=tuple(dict.fromkeys(ends)),
                   unserved=tuple(_unserved(metadata, model, {*keys.values()})))


class Scalars(Mapping[str, Any]):
    """Metadata as :class:`Fields` sees it: numbers and strings; of arrays only their count, so that none is decoded for an error.

    ``defaults`` has values for keys that may be absent.
    """

    def __init__(self, metadata: Metadata, defaults: Mapping[str, Any] | None = None) -> None:
        self._metadata = metadata
        self._defaults = defaults or {}

    def __getitem__(self, key: str) -> Any:
        return _value(self._metadata, key) if key in self._metadata else self._defaults[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)


@dataclass(frozen=True)
class _Array:
    """Stands for an array where one value is wanted: one value per layer, say."""

    count: int

    def __repr__(self) -> str:
        return f"an array of {self.count} values"


def _value(metadata: Metadata, key: str) -> Any:
    return _Array(metadata.count(key)) if metadata.is_array(key) else metadata[key]


def _name(metadata: Metadata) -> str:
    name = _value(metadata, "general.name") if "general.name" in metadata else ""
    return name[:200] if isinstance(name, str) and name.isprintable() else ""


def _vocab_size(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The vocabulary's size where no key gives it: the embedding's rows, else the tokenizer's tokens."""
    embedding = shapes.get("model.embed_tokens.weight", ())
    return embedding[0] if embedding else metadata.count("tokenizer.ggml.tokens") or None


def _check_vocabulary(metadata: Metadata, key: str, vocab_size: int, problems: list[str]) -> None:
    tokens = metadata.count("tokenizer.ggml.tokens")
    if tokens > vocab_size:
        problems.append(f"tokenizer.ggml.tokens has {tokens} entries, more than {key} {vocab_size}")
    for name in ("scores", "token_type"):
        count = metadata.count(f"tokenizer.ggml.{name}")
        if count not in (0, tokens):
            problems.append(f"tokenizer.ggml.{name} has {count} entries for {tokens} tokens")


def _rope_scaling(fields: Fields, architecture: str, has_factors: bool) -> RopeScaling | None:
    # As llama.cpp reads them: no type means linear; a factor of 0 or 1, or none, changes nothing.
    kind = fields.text(f"{architecture}.rope.scaling.type", "linear")
    keys = {name: f"{architecture}.{key}" for name, key in _SCALING.items()}
    if kind == "linear" and fields.get(keys["factor"]) is None:
        keys["factor"] = f"{architecture}.{_LINEAR}"  # of files from 2023
    if kind == "none" or (kind == "linear" and fields.get(keys["factor"]) in (None, 0, 1)):
        return RopeScaling("factors") if has_factors else None
    return scaling(fields, kind, {name: key for name, key in keys.items() if fields.get(key) != 0})


def _unserved(metadata: Metadata, model: ModelDescription, known: set[str]) -> list[str]:
    """Keys of the architecture that change the result and have no place in the description."""
    prefix = f"{model.architecture}."
    placed = known | {prefix + key for key in (*_SCALING.values(), "attention.sliding_window", "rope.scaling.type", _LINEAR, *_IGNORED)}
    unserved = []
    for key in metadata:
        if not key.startswith(prefix) or key in placed:
            continue
        value, name = _value(metadata, key), key.removeprefix(prefix)
        neutral = model.head_size if name == "attention.value_length" else _NEUTRAL.get(name, 0)
        if value != neutral:
            unserved.append(f"{key} = {shown(value)}")
    return unserved
