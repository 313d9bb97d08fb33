"""What is asked of the gate: a model as its checkpoint describes it, and the operator's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fitment.description import ModelDescription
from fitment.formats.base import Checkpoint, TensorInfo

OPEN = ("dtype", "activations", "kv_dtype")
"""Options of kernels' conditions that the gate chooses where the operator leaves them open."""

FLAGS: Mapping[str, str] = {
    "dtype": "--dtype",
    "activations": "--activations",
    "kv_dtype": "--kv-cache-dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_batch_tokens": "--max-batch-tokens",
    "kv_memory_bytes": "--kv-memory",
    "features": "--feature",
    "kernels": "--kernel",
}
"""What each option is called on the command line."""

DEFAULTS: Mapping[str, int | None] = {"max_model_len": None, "max_num_seqs": 64, "max_batch_tokens": 2048,
                                      "kv_memory_bytes": None}
"""The options that are numbers, and what they are where the operator says nothing; None is left to the gate."""


@dataclass(frozen=True)
class Request:
    """A model and how it is to run; None leaves an option to the gate.

    Attributes:
        model: The checkpoint's description of the model.
        tensors: The checkpoint's tensors by name.
        format: The checkpoint format's name.
        dtype: Element type in which layers pass activations on: fp32, fp16 or bf16.
        activations: Element type as which linear layers see them; int8 quantizes.
        kv_dtype: Element type of the key-value cache.
        max_model_len: Tokens of the longest sequence, output included.
        max_num_seqs: Sequences that are computed together.
        max_batch_tokens: Tokens of one step.
        features: Features that the operator insists on, by name.
        kv_memory_bytes: Bytes of the key-value cache.
        kernels: Kernels by op that the operator insists on: used or refused, never replaced.
    """

    model: ModelDescription
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    format: str
    dtype: str | None = None
    activations: str | None = None
    kv_dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batch_tokens: int = 2048
    features: tuple[str, ...] = ()
    kv_memory_bytes: int | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def for_checkpoint(cls, checkpoint: Checkpoint, **options: Any) -> Request:
        """The request for an open checkpoint; ``options`` are this class's own, and None is as if it were not given."""
        given = {name: value for name, value in options.items() if value is not None}
        if "features" in given:
            given["features"] = tuple(dict.fromkeys(given["features"]))
        return cls(checkpoint.model, checkpoint.tensors, checkpoint.format, **given)

    def longest(self) -> int:
        """Tokens that the model can see, with its rotary scaling: the greater of what it states and of original × factor."""
        if self.model.rope_scaling is None:
            return self.model.max_position
        parameters = self.model.rope_scaling.parameters
        original = parameters.get("original_max_position_embeddings") or self.model.max_position
        return max(self.model.max_position, int(original * parameters.get("factor", 1.0)))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict: the model in brief, its encodings, and every option."""
        encodings: dict[str, int] = {}
        for info in self.tensors.values():
            encodings[info.encoding] = encodings.get(info.encoding, 0) + 1
        options = {name: getattr(self, name) for name in FLAGS if name not in ("features", "kernels")}
        return {"model": self.model.name, "architecture": self.model.architecture, "format": self.format, "encodings": encodings,
                **options, "features": list(self.features), "kernels": dict(self.kernels)}
