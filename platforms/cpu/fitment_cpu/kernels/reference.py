"""Core's reference ops on the cache, over this platform's layout: ``[block, head, slot, dim]``."""

from __future__ import annotations

import torch

from fitment.ops import paged_attention as attention_op


def write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """The op ``write_kv`` (:mod:`fitment.ops.write_kv`)."""
    block_size = k_cache.shape[2]
    kept = ((slot_mapping >= 0) & (slot_mapping < k_cache.shape[0] * block_size)).nonzero().flatten()
    where = slot_mapping[kept].to(torch.int64)
    for values, cache in ((k, k_cache), (v, v_cache)):
        cache[where // block_size, :, where % block_size] = values[kept].to(cache.dtype)


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, out: torch.Tensor,
) -> None:
    """The op ``paged_attention`` (:mod:`fitment.ops.paged_attention`)."""
    attention_op.reference(q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), block_table, cu_query_lens, seq_lens, scale, out)
