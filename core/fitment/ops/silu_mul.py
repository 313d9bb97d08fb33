"""``silu_mul(x, out)``: the gate of a SwiGLU feed-forward layer (Shazeer, arXiv:2002.05202)."""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, out: torch.Tensor) -> None:
    """``out = silu(x[:, :m]) * x[:, m:]``.

    Args:
        x: T ``[n, 2 * m]``: gate, then up.
        out: T ``[n, m]``, written.

    Arithmetic is fp32.
    """
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)
