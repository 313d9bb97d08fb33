"""The tensors of a llama-shaped model, by Hugging Face's names: which there must be, and of what shape.

Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fitment.description import ModelDescription
from fitment.formats._fields import UNKNOWN
from fitment.formats._files import MAX_SHOWN, refusal

ARCHITECTURES = ("llama", "mistral")
"""Architectures whose tensors are checked against this layout."""

_SHOWN = 5

_DERIVED = ".self_attn.rotary_emb.inv_freq"
"""Rotary frequencies, which old checkpoints store though the configuration gives them."""


def expected_shapes(model: ModelDescription) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of ``model``, layer by layer."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    yield "model.embed_tokens.weight", (model.vocab_size, hidden)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not model.tie_embeddings:
        yield "lm_head.weight", (model.vocab_size, hidden)


def check(model: ModelDescription, shapes: Mapping[str, tuple[int, ...]], also: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Compare the tensors that there are with those that ``model`` needs.

    Returns:
        What is missing or has another shape, and what ``model`` has no place for (``also`` names more that it has).
    """
    wanted = dict(expected_shapes(model))
    missing = [name for name in wanted if name not in shapes]
    wrong = [f"{name} has shape {shapes[name]}, wanted {shape}" for name, shape in wanted.items() if shapes.get(name, shape) != shape]
    problems = wrong[:_SHOWN] + [f"{len(wrong) - _SHOWN} more have another shape than wanted" for _ in wrong[_SHOWN:_SHOWN + 1]]
    if missing:
        problems.append(f"{len(missing)} of {len(wanted)} tensors are missing: {', '.join(missing[:_SHOWN])}"
                        + (", …" if len(missing) > _SHOWN else ""))
    unused = {"lm_head.weight"} if model.tie_embeddings else set()
    extra = [name for name in shapes if name not in wanted and name not in also and name not in unused and not name.endswith(_DERIVED)]
    unserved = [f"tensors = {len(extra)} that a {model.architecture} has no place for (first: {extra[0]!r})"] if extra else []
    return problems, unserved


def settle(path: Path, model: ModelDescription, problems: Sequence[str], shapes: Mapping[str, tuple[int, ...]],
           also: Collection[str] = ()) -> ModelDescription:
    """The description that a checkpoint gives out, once its metadata and its tensors have been compared.

    What is served must be right. Of other architectures, and of models with something ``unserved``, only the reader of the
    description can say more: it gets them with what could not be read among ``unserved``.

    Args:
        path: The checkpoint.
        model: What its metadata describes.
        problems: What is wrong with the metadata.
        shapes: Its tensors, by Hugging Face's names.
        also: Names that the model has a place for beside the layout's.

    Raises:
        CheckpointError: something is wrong with a model that is served.
    """
    unserved = list(model.unserved)
    if model.architecture not in (*ARCHITECTURES, UNKNOWN):
        if problems:
            unserved.append(f"values = {len(problems)} that are missing or wrong (first: {problems[0]})")
        problems = ()
    elif not problems and not unserved:
        problems, unserved = check(model, shapes, also)
    if problems:
        raise refusal(path, problems)
    if len(unserved) > MAX_SHOWN:
        unserved[MAX_SHOWN:] = [f"{len(unserved) - MAX_SHOWN} more such values"]
    return replace(model, unserved=tuple(unserved))
