"""``silu_mul`` (:mod:`fitment.ops.silu_mul`)."""

from __future__ import annotations

import torch

from fitment_cpu.kernels._launch import TYPES, check, native, rows_of


def silu_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    """The gate's silu times the other half.

    Raises:
        ValueError: a tensor of another shape, element type or memory layout than the op's contract allows.
    """
    out_stride = rows_of("out", out)
    n, m = out.shape
    x_stride = rows_of("x", x, 2 * m, n)
    check(out.dtype == x.dtype, "out", out, f"{x.dtype} as x")
    native.silu_mul(x.data_ptr(), out.data_ptr(), x_stride, out_stride, n, m, TYPES[x.dtype])
