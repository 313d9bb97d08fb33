"""``rms_norm(x, weight, eps, out, residual)``: root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

import torch


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """``out = h / sqrt(mean(h^2) + eps) * weight``, with h = x, or h = residual + x where a residual is given.

    Args:
        x: T ``[n, hidden]``.
        weight: fp32 ``[hidden]``.
        eps: Added to the mean square.
        out: T ``[n, hidden]``, written; may be ``x``.
        residual: T ``[n, hidden]`` or None; given, it is set to ``residual + x``, rounded to T, and normalised as stored.

    Arithmetic is fp32.
    """
    if residual is not None:
        residual.add_(x)
        x = residual
    h = x.to(torch.float32)
    out.copy_(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight)
