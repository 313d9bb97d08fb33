"""``rotary`` (:mod:`fitment.ops.rotary`)."""

from __future__ import annotations

import torch

from fitment_cpu.kernels._launch import TYPES, check, heads_of, indices, native


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Turn q and k in place; a position outside the table gives NaN."""
    n, num_heads, head_size = q.shape
    heads_of("q", q), heads_of("k", k, n, head_size)
    indices("positions", positions, n)
    max_position, rot = cos_sin.shape
    check(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous() and rot % 2 == 0 and rot <= head_size, "cos_sin", cos_sin,
          f"contiguous fp32 [positions, an even number up to {head_size}]")
    check(k.dtype == q.dtype, "k", k, f"{q.dtype} as q")
    native.rotary(q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
                  n, num_heads, k.shape[1], rot, max_position, TYPES[q.dtype])
