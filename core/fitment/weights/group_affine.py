"""The ``GroupAffine`` family: integer codes in groups along a row, each group with a scale and an offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fitment.weights.specs import GroupAffineSpec


@dataclass(frozen=True)
class GroupAffine:
    """A weight ``[rows, cols]`` as codes and group parameters; a passing form, one byte a code, that platforms pack.

    Attributes:
        spec: Bits, group size, what the offset is, and the scale's dtype.
        codes: ``uint8 [rows, cols]``, each below ``2 ** bits``.
        scales: ``[rows, groups]`` in the spec's scale dtype; group g covers columns ``g * group_size`` up.
        offset: for ``constant`` an int z, w = s (c - z); for ``zero_points`` a tensor ``[rows, groups]`` of z, likewise; for
            ``minimums`` one of m, w = s c + m.
    """

    spec: GroupAffineSpec
    codes: torch.Tensor
    scales: torch.Tensor
    offset: torch.Tensor | int

    def __post_init__(self) -> None:
        rows, cols = self.codes.shape
        group_size = self.spec.group_size or cols
        wanted = (rows, cols // group_size)
        problems = []
        if self.codes.dtype != torch.uint8:
            problems.append(f"codes are {self.codes.dtype}, wanted uint8")
        if cols % group_size:
            problems.append(f"{cols} columns are not a multiple of the group size {group_size}")
        if tuple(self.scales.shape) != wanted:
            problems.append(f"scales have shape {tuple(self.scales.shape)}, wanted {wanted}")
        if isinstance(self.offset, int) != (self.spec.offset == "constant"):
            problems.append(f"offset is {type(self.offset).__name__}, which does not go with {self.spec.offset!r}")
        elif not isinstance(self.offset, int) and tuple(self.offset.shape) != wanted:
            problems.append(f"offset has shape {tuple(self.offset.shape)}, wanted {wanted}")
        if problems:
            raise ValueError(f"GroupAffine {tuple(self.codes.shape)}: {'; '.join(problems)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, cols)``."""
        return tuple(self.codes.shape)

    def dequantize(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The values ``[rows, cols]``: computed in float64, where they are exact, then rounded to ``dtype``."""
        rows, cols = self.codes.shape
        codes = self.codes.to(torch.float64).view(rows, self.scales.shape[1], self.spec.group_size or cols)
        scales = self.scales.to(torch.float64).unsqueeze(-1)
        offset = self.offset if isinstance(self.offset, int) else self.offset.to(torch.float64).unsqueeze(-1)
        values = codes * scales + offset if self.spec.offset == "minimums" else (codes - offset) * scales
        return values.reshape(rows, cols).to(dtype)

    def scale_and_bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(scale, bias)`` in fp32 ``[rows, groups]`` with w = scale * code + bias, whatever the offset is."""
        scale = self.scales.to(torch.float32)
        if self.spec.offset == "minimums":
            assert isinstance(self.offset, torch.Tensor)
            return scale, self.offset.to(torch.float32)
        zero = self.offset if isinstance(self.offset, int) else self.offset.to(torch.float32)
        return scale, -scale * zero

    def rows(self, index: torch.Tensor) -> GroupAffine:
        """The rows that ``index`` (int64) names, in its order."""
        offset = self.offset if isinstance(self.offset, int) else self.offset[index]
        return GroupAffine(self.spec, self.codes[index], self.scales[index], offset)

    @staticmethod
    def cat(weights: Sequence[GroupAffine]) -> GroupAffine:
        """Weights of one spec, column count and constant offset, one below the other."""
        first = weights[0]
        if any(weight.spec != first.spec for weight in weights):
            raise ValueError(f"GroupAffine.cat: specs differ: {', '.join(str(weight.spec) for weight in weights)}")
        offset: torch.Tensor | int
        if isinstance(first.offset, int):
            if any(weight.offset != first.offset for weight in weights):
                raise ValueError(f"GroupAffine.cat: constant offsets differ: {[weight.offset for weight in weights]}")
            offset = first.offset
        else:
            offset = torch.cat([weight.offset for weight in weights if isinstance(weight.offset, torch.Tensor)])
        return GroupAffine(first.spec, torch.cat([weight.codes for weight in weights]),
                           torch.cat([weight.scales for weight in weights]), offset)
