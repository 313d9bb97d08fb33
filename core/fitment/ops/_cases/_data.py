"""Values for cases, the same on every machine and in every run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from zlib import crc32

import torch

from fitment.dtypes import torch_dtype
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine
from fitment.weights.specs import DENSE_DTYPES, DenseSpec, GroupAffineSpec, WeightSpec

SHORT = {"constant": "const", "zero_points": "zero", "minimums": "min"}


class Draw:
    """Pseudo-random values that a name and a seed determine."""

    def __init__(self, name: str, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(crc32(name.encode()) + seed)

    def normal(self, *shape: int, dtype: str = "fp32", scale: float = 1.0) -> torch.Tensor:
        """Normal values of standard deviation ``scale``."""
        return (torch.randn(shape, generator=self._generator) * scale).to(torch_dtype(dtype))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """fp32 values in ``[low, high)``."""
        return torch.rand(shape, generator=self._generator) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int32 values in ``[low, high)``."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=torch.int32)

    def shuffled(self, count: int) -> torch.Tensor:
        """The int32 numbers below ``count`` in some order."""
        return torch.randperm(count, generator=self._generator).to(torch.int32)


def specs() -> Iterator[WeightSpec]:
    """Every kind of weight that the families have."""
    for dtype in DENSE_DTYPES:
        yield DenseSpec(dtype)
    for bits in (2, 3, 4, 5, 6, 8):
        for group_size in (32, 64, 128, 0):
            for offset in SHORT:
                for scale_dtype in ("fp16", "bf16", "fp32"):
                    yield GroupAffineSpec(bits, group_size, offset, scale_dtype)


def spec_name(spec: WeightSpec) -> str:
    """``dense-bf16``, ``ga4-g32-min-fp16``."""
    if isinstance(spec, DenseSpec):
        return f"dense-{spec.dtype}"
    return f"ga{spec.bits}-g{spec.group_size or 'row'}-{SHORT[spec.offset]}-{spec.scale_dtype}"


@lru_cache(maxsize=16)
def weight(spec: WeightSpec, rows: int, cols: int) -> Dense | GroupAffine:
    """A weight whose values have a standard deviation near 1/8; half of a group-affine one's scales are negative."""
    draw = Draw(f"{spec_name(spec)} {rows} {cols}", 0)
    if isinstance(spec, DenseSpec):
        return Dense(draw.normal(rows, cols, dtype=spec.dtype, scale=0.125))
    groups = cols // (spec.group_size or cols)
    levels = 1 << spec.bits
    scale_dtype = torch_dtype(spec.scale_dtype)
    sign = draw.integers(0, 2, rows, groups) * 2 - 1
    scales = (draw.uniform(rows, groups, low=0.2, high=0.6) * sign / levels).to(scale_dtype)
    offset: torch.Tensor | int = levels // 2
    if spec.offset == "zero_points":
        offset = draw.integers(levels // 4, levels // 4 * 3 + 1, rows, groups).to(torch.uint8)
    elif spec.offset == "minimums":
        offset = (-scales.to(torch.float32) * levels * draw.uniform(rows, groups, low=0.25, high=0.75)).to(scale_dtype)
    return GroupAffine(spec, draw.integers(0, levels, rows, cols).to(torch.uint8), scales, offset)


def cols_of(spec: WeightSpec) -> int:
    """A column count that goes with a spec: odd where any goes, else a few groups."""
    if isinstance(spec, DenseSpec):
        return 77
    return {32: 96, 64: 192, 128: 256, 0: 72}.get(spec.group_size, 3 * spec.group_size)
