"""The table of cosines and sines that the op ``rotary`` reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fitment.description import ModelDescription
from fitment.errors import Problems
from fitment_engine.rope_scalings import REQUIRED, ROPE_SCALINGS, inverse_frequencies


def cos_sin_table(model: ModelDescription, max_position: int, factors: Sequence[float] | None = None) -> torch.Tensor:
    """Cosines and sines of every position.

    Args:
        model: Gives the rotary size, theta and scaling.
        max_position: Rows of the table.
        factors: Divisors of the inverse frequencies, for a checkpoint that carries them.

    Returns:
        fp32 ``[max_position, rotary_size]``: a row's cosines, then its sines; angles are computed in float64.

    Raises:
        Problems: the scaling lacks parameters.
    """
    size = model.rotary_size or model.head_size
    inverse, amplitude = inverse_frequencies(size, model.rope_theta), 1.0
    scaling = model.rope_scaling
    if scaling is not None:
        missing = [name for name in REQUIRED[scaling.kind] if scaling.parameters.get(name) is None]
        if missing:
            raise Problems(f"rope_scaling {scaling.kind!r}", [f"{name} is missing" for name in missing])
        inverse, amplitude = ROPE_SCALINGS[scaling.kind](inverse, scaling.parameters, model.rope_theta, model.max_position)
    frequencies = torch.tensor(inverse, dtype=torch.float64)
    if factors is not None:
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float64)
    angles = torch.arange(max_position, dtype=torch.float64).unsqueeze(-1) * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude).to(torch.float32).contiguous()
