"""The ``Dense`` family: one floating-point value an element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fitment.dtypes import dtype_name
from fitment.weights.specs import DenseSpec


@dataclass(frozen=True)
class Dense:
    """``values``: fp32, fp16 or bf16, ``[rows, cols]`` (or ``[n]`` for a vector)."""

    values: torch.Tensor

    @property
    def spec(self) -> DenseSpec:
        """What this weight is, without its values."""
        return DenseSpec(dtype_name(self.values.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, cols)`` or ``(n,)``."""
        return tuple(self.values.shape)

    def dequantize(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The values in ``dtype``."""
        return self.values.to(dtype)

    def rows(self, index: torch.Tensor) -> Dense:
        """The rows that ``index`` (int64) names, in its order."""
        return Dense(self.values[index])

    @staticmethod
    def cat(weights: Sequence[Dense]) -> Dense:
        """Weights of one dtype and column count, one below the other."""
        return Dense(torch.cat([weight.values for weight in weights]))
