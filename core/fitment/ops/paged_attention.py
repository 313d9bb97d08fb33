"""``paged_attention(…)``: causal attention of variable lengths over a paged cache: prefill, chunk, decode and verification."""

from __future__ import annotations

import torch


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """``out = softmax(scale * q @ k.T) @ v`` over each sequence's own keys.

    Args:
        q: T ``[n, num_heads, head_size]``, turned already. Query head h uses key-value head ``h // (num_heads / num_kv_heads)``.
        k_cache: The platform's layout; the reference's is ``[block, slot, head, dim]``.
        v_cache: Likewise.
        block_table: int32 ``[num_seqs, max_blocks]``: a sequence's blocks in order; entries past its length are not looked at.
        cu_query_lens: int32 ``[num_seqs + 1]``: sequence s owns query rows ``[cu[s], cu[s+1])``, perhaps none.
        seq_lens: int32 ``[num_seqs]``: cached tokens, the queries' own included, written before. Query row j of ``ql`` sits at
            position ``seq_lens[s] - ql + j`` and sees the keys up to it. A sequence of length 0 gives zeros.
        scale: Factor on the scores.
        out: T ``[n, num_heads, head_size]``, written for rows below ``cu[num_seqs]``.

    Softmax and sums are fp32 or better.
    """
    num_heads, block_size = q.shape[1], k_cache.shape[1]
    bounds = cu_query_lens.tolist()
    for s, length in enumerate(seq_lens.tolist()):
        rows = slice(bounds[s], bounds[s + 1])
        count = bounds[s + 1] - bounds[s]
        if count == 0:
            continue
        if length == 0:
            out[rows] = 0
            continue
        blocks = block_table[s, : -(-length // block_size)].to(torch.int64)
        k = k_cache[blocks].flatten(0, 1)[:length].to(torch.float32)
        v = v_cache[blocks].flatten(0, 1)[:length].to(torch.float32)
        group = num_heads // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].to(torch.float32), k) * scale
        positions = torch.arange(length - count, length, device=q.device)
        hidden = torch.arange(length, device=q.device) > positions.unsqueeze(-1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
