"""``linear(x, weight, out)``: a matrix product with packed weights."""

from __future__ import annotations

import torch

from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine


def reference(x: torch.Tensor, weight: Dense | GroupAffine, out: torch.Tensor) -> None:
    """``out = x @ weight.T``.

    Args:
        x: T ``[n, cols]``; n may be 0.
        weight: ``[rows, cols]`` as the kernel's ``prepare`` gave it; the reference takes the family as it is.
        out: T or fp32 ``[n, rows]``, written.
    """
    values = weight.dequantize(torch.float32)
    out.copy_(x.to(torch.float32) @ values.T)
