"""How rotary frequencies are scaled for longer contexts: a function a scheme, on plain floats.

The formulas are those of Hugging Face's ``modeling_rope_utils``: linear (position interpolation, arXiv:2306.15595), llama3 (Llama 3.1's
model card), yarn (arXiv:2309.00071). *factors* divides each frequency by a number that the checkpoint carries (GGUF's
``rope_freqs.weight``). Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Frequencies = list[float]
Scaling = Callable[[Frequencies, "Mapping[str, float]", float, int], tuple[Frequencies, float]]
"""(inverse frequencies, parameters, theta, max_position) -> (scaled ones, factor on cosines and sines)."""


def inverse_frequencies(rotary_size: int, theta: float) -> Frequencies:
    """``theta ** (-2 i / rotary_size)`` for each pair i of elements."""
    return [theta ** (-2.0 * i / rotary_size) for i in range(rotary_size // 2)]


def _linear(inverse: Frequencies, parameters: Mapping[str, float], theta: float, max_position: int) -> tuple[Frequencies, float]:
    return [value / parameters["factor"] for value in inverse], 1.0


def _llama3(inverse: Frequencies, parameters: Mapping[str, float], theta: float, max_position: int) -> tuple[Frequencies, float]:
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    scaled = []
    for value in inverse:
        wavelength = 2 * math.pi / value
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        scaled.append((1 - smooth) * value / factor + smooth * value)
    return scaled, 1.0


def _yarn(inverse: Frequencies, parameters: Mapping[str, float], theta: float, max_position: int) -> tuple[Frequencies, float]:
    factor = parameters["factor"]
    original = parameters.get("original_max_position_embeddings") or max_position
    dim = 2 * len(inverse)

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(parameters.get("beta_fast") or 32.0), correction(parameters.get("beta_slow") or 1.0)
    if parameters.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    ramp = [min(max((i - low) / span, 0.0), 1.0) for i in range(len(inverse))]
    scaled = [value / factor * r + value * (1 - r) for value, r in zip(inverse, ramp, strict=True)]
    return scaled, _yarn_attention_factor(factor, parameters)


def _yarn_attention_factor(factor: float, parameters: Mapping[str, float]) -> float:
    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return given
    own, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if own and all_dim:
        return mscale(factor, own) / mscale(factor, all_dim)
    return mscale(factor)


def _factors(inverse: Frequencies, parameters: Mapping[str, float], theta: float, max_position: int) -> tuple[Frequencies, float]:
    return inverse, 1.0  # the divisors are a tensor of the checkpoint, applied by the caller


ROPE_SCALINGS: Mapping[str, Scaling] = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "factors": _factors}
"""Every scheme by its name in a model's configuration."""

REQUIRED: Mapping[str, Sequence[str]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "factors": (),
}
"""The parameters that a scheme cannot do without."""
