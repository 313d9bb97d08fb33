"""``embedding(ids, weight, out)``: rows of a table."""

from __future__ import annotations

import torch

from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine


def reference(ids: torch.Tensor, weight: Dense | GroupAffine, out: torch.Tensor) -> None:
    """``out[i] = weight[ids[i]]``.

    Args:
        ids: int32 ``[n]``. The caller keeps them in ``[0, rows)``; a kernel never reads outside memory for others and writes NaN.
        weight: ``[rows, cols]`` as the kernel's ``prepare`` gave it.
        out: T ``[n, cols]``, written.
    """
    rows = weight.shape[0]
    inside = (ids >= 0) & (ids < rows)
    picked = weight.rows(torch.where(inside, ids, 0).to(torch.int64)).dequantize(torch.float32)
    out.copy_(torch.where(inside.unsqueeze(-1), picked, torch.nan))
