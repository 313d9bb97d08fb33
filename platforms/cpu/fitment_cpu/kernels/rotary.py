"""``rotary`` (:mod:`fitment.ops.rotary`)."""

from __future__ import annotations

import torch

from fitment_cpu.kernels._launch import TYPES, check, heads_of, indices, native


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Turn q and k in place. A token whose position lies outside the table gets NaN.

    Raises:
        ValueError: a tensor of another shape, element type or memory layout than the op's contract allows.
    """
    heads_of("q", q)
    n, num_heads, head_size = q.shape
    heads_of("k", k, n, head_size)
    check(k.dtype == q.dtype, "k", k, f"{q.dtype} as q")
    indices("positions", positions, n)
    is_right = (cos_sin.dtype == torch.float32 and cos_sin.ndim == 2 and cos_sin.is_contiguous() and cos_sin.device.type == "cpu"
                and cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= head_size)
    check(is_right, "cos_sin", cos_sin, f"contiguous fp32 [max_position, an even number up to {head_size}] on the CPU")
    native.rotary(
        q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        n, num_heads, k.shape[1], cos_sin.shape[1], cos_sin.shape[0], TYPES[q.dtype],
    )
