"""``write_kv(k, v, k_cache, v_cache, slot_mapping)``: new keys and values into the paged cache."""

from __future__ import annotations

import torch

from fitment.hardware import KVLayout

LAYOUT = KVLayout("reference", 16, ("block", "slot", "head", "dim"), ("block", "slot", "head", "dim"), ("fp32", "bf16", "fp16"))
"""The layout of the reference implementations."""


def reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write token i's keys and values to slot ``slot_mapping[i]``, which is ``block * block_size + offset``.

    Args:
        k: T ``[n, num_kv_heads, head_size]``.
        v: T ``[n, num_kv_heads, head_size]``.
        k_cache: The platform's layout and cache dtype, written; the reference's is ``[block, slot, head, dim]``.
        v_cache: Likewise.
        slot_mapping: int32 ``[n]``; a token whose slot is negative, or beyond the cache, is not written.
    """
    slots = k_cache.shape[0] * k_cache.shape[1]
    kept = ((slot_mapping >= 0) & (slot_mapping < slots)).nonzero().flatten()
    where = slot_mapping[kept].to(torch.int64)
    k_cache.view(slots, *k_cache.shape[2:])[where] = k[kept].to(k_cache.dtype)
    v_cache.view(slots, *v_cache.shape[2:])[where] = v[kept].to(v_cache.dtype)
