"""``embedding`` (:mod:`fitment.ops.embedding`) from a packed table, which a tied output layer shares."""

from __future__ import annotations

import torch

from fitment_cpu.kernels._launch import TYPES, check, native, rows_of
from fitment_cpu.kernels.weights import PackedWeight


def embedding(ids: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
    """Rows of the table; an id outside it gives NaN."""
    check(ids.dtype == torch.int32 and ids.dim() == 1 and ids.is_contiguous(), "ids", ids, "contiguous int32 [n]")
    out_stride = rows_of("out", out, weight.shape[1], ids.shape[0])
    native.embedding(ids.data_ptr(), out.data_ptr(), weight.native, out_stride, ids.shape[0], TYPES[out.dtype])
