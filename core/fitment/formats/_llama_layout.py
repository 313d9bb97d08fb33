"""The tensors of a llama-shaped model, by Hugging Face's names: which there must be, and of what shape.

Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fitment.description import ModelDescription

ARCHITECTURES = ("llama", "mistral")
"""Architectures whose tensors are checked against this layout."""

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


def check(model: ModelDescription, shapes: Mapping[str, tuple[int, ...]], also: frozenset[str]) -> tuple[list[str], list[str]]:
    """Compare the tensors that there are with those that ``model`` needs.

    Returns:
        What is missing or has another shape, and what ``model`` has no place for (``also`` names more that it has).
    """
    problems = []
    known = set(also)
    for name, wanted in expected_shapes(model):
        known.add(name)
        shape = shapes.get(name)
        if shape is None:
            problems.append(f"{name} is missing")
        elif shape != wanted:
            problems.append(f"{name} has shape {shape}, wanted {wanted}")
    if model.tie_embeddings:
        known.add("lm_head.weight")
    extra = [name for name in shapes if name not in known and not name.endswith(_DERIVED)]
    unserved = [f"tensors = {len(extra)} that a {model.architecture} has no place for (first: {extra[0]!r})"] if extra else []
    return problems, unserved
