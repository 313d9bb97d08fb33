"""``write_kv`` (:mod:`fitment.ops.write_kv`) into a cache laid out ``[block, head, slot, dim]``."""

from __future__ import annotations

import torch

from fitment_cpu.kernels._launch import TYPES, caches_of, check, heads_of, indices, native


def write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write new keys and values to their slots.

    Raises:
        ValueError: a tensor of another shape, element type or memory layout than the op's contract allows.
    """
    heads_of("k", k)
    n, num_kv_heads, head_size = k.shape
    heads_of("v", v, n, head_size)
    check(v.dtype == k.dtype and v.shape == k.shape, "v", v, f"{k.dtype} {list(k.shape)} as k")
    num_blocks, block_size = caches_of(k_cache, v_cache, num_kv_heads, head_size)
    indices("slot_mapping", slot_mapping, n)
    native.write_kv(
        k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slot_mapping.data_ptr(), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), n, num_kv_heads, head_size, num_blocks, block_size, TYPES[k.dtype], TYPES[k_cache.dtype],
    )
