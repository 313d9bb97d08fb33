"""``rotary(q, k, positions, cos_sin)``: rotary position embedding (Su et al., arXiv:2104.09864), half-split."""

from __future__ import annotations

import torch


def reference(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Turn the first ``rot`` elements of every head in place: ``x1' = x1 cos - x2 sin``, ``x2' = x2 cos + x1 sin``.

    Args:
        q: T ``[n, num_heads, head_size]``, changed in place.
        k: T ``[n, num_kv_heads, head_size]``, changed in place.
        positions: int32 ``[n]``, in ``[0, max_position)``.
        cos_sin: fp32 ``[max_position, rot]``: cosines in the first half of a row, sines in the second; ``rot`` even, at most
            ``head_size``. x1 is a head's elements ``[0, rot/2)``, x2 those of ``[rot/2, rot)``.
    """
    half = cos_sin.shape[1] // 2
    row = cos_sin[positions.to(torch.int64)].unsqueeze(1)
    cos, sin = row[..., :half], row[..., half:]
    for x in (q, k):
        x1, x2 = x[..., :half].to(torch.float32), x[..., half : 2 * half].to(torch.float32)
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)  # before either half is written: fp32 ones are views
        x[..., : 2 * half] = turned.to(x.dtype)
