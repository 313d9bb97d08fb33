"""Models, written once over bound ops: ``ARCHITECTURES`` maps a checkpoint's architecture to the class that computes it."""

from __future__ import annotations

from collections.abc import Mapping

ARCHITECTURES: Mapping[str, str] = {
    "llama": "fitment_engine.models.llama:Llama",
    "mistral": "fitment_engine.models.llama:Llama",
}
