"""``sample`` (:mod:`fitment.ops.sample`)."""

from __future__ import annotations

import torch

from fitment_cpu.kernels._launch import check, indices, native, rows_of


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One token a row. A temperature that is negative, infinite or NaN gives -1.

    Raises:
        ValueError: a tensor of another shape, element type or memory layout than the op's contract allows.
    """
    stride = rows_of("logits", logits)
    n, vocab = logits.shape
    check(logits.dtype == torch.float32, "logits", logits, "fp32")
    for name, values in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p), ("uniform", uniform)):
        is_right = values.dtype == torch.float32 and values.shape == (n,) and values.is_contiguous()
        check(is_right and values.device.type == "cpu", name, values, f"contiguous fp32 [{n}] on the CPU")
    indices("top_k", top_k, n)
    indices("out", out, n)
    native.sample(
        logits.data_ptr(), temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(), uniform.data_ptr(),
        out.data_ptr(), stride, n, vocab,
    )
