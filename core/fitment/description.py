"""What a checkpoint says of its model: the neutral form that formats fill in and that the gate and the engine read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for longer contexts: ``kind`` (linear, llama3, yarn) and its parameters.

    ``parameters`` has the names of Hugging Face's ``rope_scaling``: ``factor``, ``low_freq_factor``,
    ``high_freq_factor``, ``original_max_position_embeddings``, ``attention_factor``, ``beta_fast``, ``beta_slow``, …
    """

    kind: str
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.kind, tuple(sorted(self.parameters.items()))))


@dataclass(frozen=True)
class ModelDescription:
    """A decoder-only language model as its checkpoint describes it.

    ``architecture`` is the model family's lower-case name (``llama``, ``mistral``); ``unserved`` lists, as ``field = value``,
    what the checkpoint asks for and this description has no place for, so that whoever serves it can refuse.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rotary_size: int = 0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""
    unserved: tuple[str, ...] = ()

    @property
    def query_per_kv(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    def kv_elements(self) -> int:
        """Elements of the key-value cache per token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size


@dataclass(frozen=True)
class TokenizerSource:
    """Where a checkpoint's tokenizer is: ``kind`` "gguf" (metadata holds it) or "hf" (``files``: name to path)."""

    kind: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
