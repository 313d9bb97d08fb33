"""``rms_norm`` (:mod:`fitment.ops.rms_norm`)."""

from __future__ import annotations

import torch

from fitment_cpu.kernels._launch import TYPES, check, native, rows_of


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    """Normalise rows, with the residual added first where one is given.

    Raises:
        ValueError: a tensor of another shape, element type or memory layout than the op's contract allows.
    """
    x_stride = rows_of("x", x)
    n, hidden = x.shape
    out_stride = rows_of("out", out, hidden, n)
    check(out.dtype == x.dtype, "out", out, f"{x.dtype} as x")
    is_right = weight.dtype == torch.float32 and weight.shape == (hidden,) and weight.is_contiguous()
    check(is_right and weight.device.type == "cpu", "weight", weight, f"contiguous fp32 [{hidden}] on the CPU")
    residual_address = residual_stride = 0
    if residual is not None:
        residual_stride = rows_of("residual", residual, hidden, n)
        check(residual.dtype == x.dtype, "residual", residual, f"{x.dtype} as x")
        residual_address = residual.data_ptr()
    native.rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), residual_address, x_stride, out_stride, residual_stride, eps, n, hidden,
        TYPES[x.dtype],
    )
