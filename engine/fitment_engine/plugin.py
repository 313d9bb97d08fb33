"""What this engine has, for the matrix: imports no torch."""

from __future__ import annotations

from fitment.hookspecs import EngineInfo, hookimpl
from fitment_engine import __version__
from fitment_engine.models import ARCHITECTURES
from fitment_engine.rope_scalings import ROPE_SCALINGS

FITMENT_API = ">=1.0,<2"

FEATURES = (
    "continuous_batching",
    "chunked_prefill",
    "graph_capture",
    "kv_cache.fp32",
    "kv_cache.bf16",
    "kv_cache.fp16",
    "sampling",
    "seeded_sampling",
    "logprobs",
    "prompt_logprobs",
)


@hookimpl
def fitment_engine() -> EngineInfo:
    """The architectures, features and rope scalings of this engine."""
    return EngineInfo("fitment", __version__, tuple(ARCHITECTURES), FEATURES, tuple(ROPE_SCALINGS))
