"""How near an output must come: normalised mean squared error, and no single element far off."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUNDING = {"fp32": 1e-12, "fp16": 1e-7, "bf16": 6e-6}
"""NMSE of fp32 arithmetic whose result is rounded to a dtype: ``ulp ** 2 / 12`` at most, and for fp32 what sums add.

Truncation, which gives four times as much, is not near enough.
"""

FAR = 8.0
"""Standard deviations (of an error as great as the tolerance) by which an element may be off."""


@dataclass(frozen=True, eq=False)
class Close:
    """Values that an output must come near.

    Attributes:
        values: float64; NaN where NaN must be.
        tolerance: Greatest NMSE; 0 asks for equality.
        kept: bool, where the output must hold, bit for bit, what it held before; ``values`` are not looked at there.
        magnitude: float64, what errors are measured against instead of the values: sums that cancel are small by luck.
    """

    values: torch.Tensor
    tolerance: float
    kept: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None

    def problem(self, got: torch.Tensor, before: torch.Tensor) -> str:
        if self.kept is None:
            return difference(got, self.values, self.tolerance, self.magnitude)
        kept = self.kept.expand(got.shape)
        changed = ~same_bits(got, before) & kept
        if changed.any():
            return f"{_place(changed)} was changed, from {_at(before, changed)} to {_at(got, changed)}, and is not to be written"
        return difference(got[~kept], self.values[~kept], self.tolerance)


def difference(got: torch.Tensor, want: torch.Tensor, tolerance: float, magnitude: torch.Tensor | None = None) -> str:
    """What is wrong with ``got`` against ``want`` (float64); "" when it is near enough. ``magnitude`` is by default ``want``.

    Of few elements the mean may be less lucky: of one, three times the tolerance, as the square of a uniform error has it.
    """
    if not got.numel():
        return ""
    tolerance *= 1 + 2 / got.numel() ** 0.5
    got = got.to(torch.float64)
    amiss = got.isnan() != want.isnan()
    if amiss.any():
        return f"{int(amiss.sum())} of {got.numel()} elements are NaN, or should be; the first, {_place(amiss)}, is " \
               f"{_at(got, amiss)}, wanted {_at(want, amiss)}"
    error = (got - want).nan_to_num(nan=0.0, posinf=torch.inf, neginf=torch.inf).abs()
    size = (want if magnitude is None else magnitude).nan_to_num(nan=0.0).abs()
    energy = float(size.square().sum())
    squares = float(error.square().sum())
    nmse = squares / energy if energy else torch.inf if squares else 0.0
    worst = error == error.max()
    shown = f"the worst element, {_place(worst)}, is {_at(got, worst)}, wanted {_at(want, worst)}"
    if nmse > tolerance:
        return f"NMSE {nmse:.2e} is above {tolerance:.1e}; {shown}"
    far = error > FAR * tolerance**0.5 * torch.maximum(size, want.abs()).clamp_min((energy / size.numel()) ** 0.5)
    if far.any():
        return f"{int(far.sum())} elements are far off; the first, {_place(far)}, is {_at(got, far)}, wanted {_at(want, far)}"
    return ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool, where two tensors of one shape and dtype have the same bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(bits) == b.contiguous().view(bits)


def _place(where: torch.Tensor) -> str:
    return str(where.nonzero()[0].tolist())


def _at(values: torch.Tensor, where: torch.Tensor) -> str:
    return f"{float(values[tuple(where.nonzero()[0].tolist())]):.6g}"
