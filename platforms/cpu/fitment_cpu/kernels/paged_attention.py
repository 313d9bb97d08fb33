"""``paged_attention`` (:mod:`fitment.ops.paged_attention`) over a cache laid out ``[block, head, slot, dim]``."""

from __future__ import annotations

import torch

from fitment_cpu.kernels._launch import TYPES, caches_of, check, heads_of, indices, native


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, out: torch.Tensor,
) -> None:
    """Attention of each sequence over its own keys."""
    n, num_heads, head_size = q.shape
    num_kv_heads = k_cache.shape[1]
    heads_of("q", q), heads_of("out", out, n, head_size)
    num_blocks, block_size = caches_of(k_cache, v_cache, num_kv_heads, head_size)
    num_seqs, max_blocks = block_table.shape
    check(num_heads % num_kv_heads == 0, "q", q, f"a multiple of {num_kv_heads} heads")
    check(block_table.dtype == torch.int32 and block_table.is_contiguous(), "block_table", block_table, "contiguous int32 [num_seqs, max_blocks]")
    indices("cu_query_lens", cu_query_lens, num_seqs + 1)
    indices("seq_lens", seq_lens, num_seqs)
    check(out.dtype == q.dtype and out.shape == q.shape, "out", out, f"{q.dtype} {list(q.shape)} as q")
    native.paged_attention(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_table.data_ptr(), cu_query_lens.data_ptr(), seq_lens.data_ptr(),
        out.data_ptr(), q.stride(0), q.stride(1), out.stride(0), out.stride(1), scale, num_seqs, max_blocks, num_heads, num_kv_heads,
        head_size, num_blocks, block_size, TYPES[q.dtype], TYPES[k_cache.dtype])
