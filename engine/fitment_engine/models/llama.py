"""Llama and what is built like it (SmolLM2, Mistral without a sliding window), over bound ops and fixed buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fitment.description import ModelDescription
from fitment_engine.batch import Batch
from fitment_engine.binding import Binder, Linear
from fitment_engine.rope import cos_sin_table

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """The model: weights prepared, ops bound, activation buffers allocated for ``max_tokens`` tokens a step."""

    def __init__(self, model: ModelDescription, binder: Binder, max_tokens: int, dtype: torch.dtype) -> None:
        self._model = model
        self._rms_norm = binder.op("rms_norm")
        self._rotary = binder.op("rotary")
        self._write_kv = binder.op("write_kv")
        self._attention = binder.op("paged_attention")
        self._silu_mul = binder.op("silu_mul")
        self._embed, self._table = binder.embedding("model.embed_tokens.weight")
        self._layers = [_load_layer(f"model.layers.{i}.", binder) for i in range(model.num_layers)]
        self._norm = binder.vector("model.norm.weight")
        head = "model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
        self._head = binder.linear([head])
        table = cos_sin_table(model, binder.plan.max_model_len, binder.factors(ROPE_FACTORS))
        self._cos_sin = table.to(binder.device)
        self._scale = model.head_size**-0.5

        def buffer(width: int) -> torch.Tensor:
            return torch.empty(max_tokens, width, dtype=dtype, device=binder.device)

        self._residual = buffer(model.hidden_size)
        self._x = buffer(model.hidden_size)
        self._qkv = buffer((model.num_heads + 2 * model.num_kv_heads) * model.head_size)
        self._attended = buffer(model.num_heads * model.head_size)
        self._gate_up = buffer(2 * model.intermediate_size)
        self._activated = buffer(model.intermediate_size)

    def forward(self, batch: Batch, num_tokens: int, num_seqs: int, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Compute one step.

        Args:
            batch: The step's inputs; the first ``num_tokens`` rows and ``num_seqs`` sequences count.
            num_tokens: Tokens of the step.
            num_seqs: Sequences of the step.
            caches: Each layer's key and value cache, written at the batch's slots.

        Returns:
            The final hidden states after the last norm, T ``[num_tokens, hidden]``: a view of a buffer that the next step overwrites.
        """
        model, n = self._model, num_tokens
        residual, x, qkv = self._residual[:n], self._x[:n], self._qkv[:n]
        heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_size
        q = qkv[:, : heads * size].view(n, heads, size)
        k = qkv[:, heads * size : (heads + kv_heads) * size].view(n, kv_heads, size)
        v = qkv[:, (heads + kv_heads) * size :].view(n, kv_heads, size)
        attended, gate_up, activated = self._attended[:n], self._gate_up[:n], self._activated[:n]
        attended_heads = attended.view(n, heads, size)
        positions, slots = batch.positions[:n], batch.slot_mapping[:n]
        block_table, seq_lens = batch.block_table[:num_seqs], batch.seq_lens[:num_seqs]
        cu_query_lens = batch.cu_query_lens[: num_seqs + 1]
        eps = model.rms_norm_eps

        self._embed(batch.ids[:n], self._table, residual)
        for i, (layer, (k_cache, v_cache)) in enumerate(zip(self._layers, caches, strict=True)):
            if i == 0:
                self._rms_norm(residual, layer.input_norm, eps, x, None)
            else:
                self._rms_norm(x, layer.input_norm, eps, x, residual)
            layer.qkv(x, qkv)
            self._rotary(q, k, positions, self._cos_sin)
            self._write_kv(k, v, k_cache, v_cache, slots)
            self._attention(q, k_cache, v_cache, block_table, cu_query_lens, seq_lens, self._scale, attended_heads)
            layer.o(attended, x)
            self._rms_norm(x, layer.post_norm, eps, x, residual)
            layer.gate_up(x, gate_up)
            self._silu_mul(gate_up, activated)
            layer.down(activated, x)
        self._rms_norm(x, self._norm, eps, x, residual)
        return x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """The output layer: ``out`` fp32 ``[n, vocab]`` from final hidden states T ``[n, hidden]``."""
        self._head(hidden, out)


def _load_layer(prefix: str, binder: Binder) -> _Layer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return _Layer(
        input_norm=binder.vector(f"{prefix}input_layernorm.weight"),
        qkv=binder.linear([f"{attention}{name}_proj.weight" for name in "qkv"]),
        o=binder.linear([f"{attention}o_proj.weight"]),
        post_norm=binder.vector(f"{prefix}post_attention_layernorm.weight"),
        gate_up=binder.linear([f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"]),
        down=binder.linear([f"{mlp}down_proj.weight"]),
    )
