"""``linear`` (:mod:`fitment.ops.linear`) on packed weights, an entry for each way to see the activations."""

from __future__ import annotations

import torch

from fitment_cpu.kernels._launch import TYPES, check, native, rows_of
from fitment_cpu.kernels.weights import PackedWeight

_FP32, _BF16, _INT8 = range(3)


def linear_fp32(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
    """The activations as they are, products and sums in fp32."""
    _linear(x, weight, out, _FP32)


def linear_bf16(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
    """The activations rounded to bf16, sums in fp32."""
    _linear(x, weight, out, _BF16)


def linear_int8(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
    """The activations quantized to int8 in steps of a row, finer for groups of small values, with second bytes for great ones
    (``native/linear_int8.inl``)."""
    if not weight.is_affine:
        raise ValueError("linear_int8 multiplies integer codes, and this weight is dense; use linear_bf16")
    _linear(x, weight, out, _INT8)


def _linear(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, activations: int) -> None:
    rows, cols = weight.shape
    x_stride, n = rows_of("x", x, cols), x.shape[0]
    out_stride = rows_of("out", out, rows, n)
    check(out.dtype == x.dtype or out.dtype == torch.float32, "out", out, f"{x.dtype} as x, or fp32")
    native.linear(x.data_ptr(), out.data_ptr(), weight.native, x_stride, out_stride, n, TYPES[x.dtype], TYPES[out.dtype], activations)
