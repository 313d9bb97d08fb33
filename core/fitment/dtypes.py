"""Element types: Fitment's names and torch's objects. Types that differ in bits differ in name."""

from __future__ import annotations

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of ``name``; KeyError for a name that is not in the table."""
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Fitment's name of a torch dtype, or torch's own where Fitment has none."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")
