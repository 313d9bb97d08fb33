"""``paged_attention`` (:mod:`fitment.ops.paged_attention`) over a cache laid out ``[block, head, slot, dim]``."""

from __future__ import annotations

import torch

from fitment_cpu.kernels._launch import TYPES, caches_of, check, heads_of, indices, native

MAX_HEAD_SIZE = 4096
"""A row's floats in ``native/scratch.h``."""


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of each sequence over its own keys; the same bits whatever the batch, the chunking and the number of threads.

    A sequence with a block outside the cache, within its length, gets NaN. ``cu_query_lens`` is trusted to stay within q's rows.

    Raises:
        ValueError: a tensor of another shape, element type or memory layout than the op's contract allows.
    """
    heads_of("q", q)
    n, num_heads, head_size = q.shape
    num_kv_heads = k_cache.shape[1] if k_cache.ndim == 4 else 0
    num_blocks, block_size = caches_of(k_cache, v_cache, num_kv_heads, head_size)
    is_right = 0 < head_size <= MAX_HEAD_SIZE and num_kv_heads > 0 and num_heads % num_kv_heads == 0 and block_size > 0
    check(is_right, "q", q, f"[n, a multiple of {num_kv_heads} heads, at most {MAX_HEAD_SIZE}] for caches {list(k_cache.shape)}")
    heads_of("out", out, n, head_size)
    check(out.dtype == q.dtype and out.shape == q.shape, "out", out, f"{q.dtype} {list(q.shape)} as q")
    is_right = block_table.dtype == torch.int32 and block_table.ndim == 2 and block_table.is_contiguous()
    is_right = is_right and block_table.device.type == "cpu"
    check(is_right, "block_table", block_table, "contiguous int32 [num_seqs, max_blocks] on the CPU")
    num_seqs, max_blocks = block_table.shape
    indices("cu_query_lens", cu_query_lens, num_seqs + 1)
    indices("seq_lens", seq_lens, num_seqs)
    native.paged_attention(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_table.data_ptr(), cu_query_lens.data_ptr(),
        seq_lens.data_ptr(), out.data_ptr(), q.stride(0), q.stride(1), out.stride(0), out.stride(1), scale, num_seqs, max_blocks,
        num_heads, num_kv_heads, head_size, num_blocks, block_size, TYPES[q.dtype], TYPES[k_cache.dtype],
    )
