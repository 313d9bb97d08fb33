"""Tokenizers: from ``tokenizer.json``, or rebuilt from GGUF metadata, over the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Iterable

from fitment.description import TokenizerSource
from fitment.formats.base import CheckpointError
from fitment_engine.tokenizer.base import IncrementalDetokenizer, Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "tokenizer_for"]


def tokenizer_for(source: TokenizerSource, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        source: Where it is.
        eos_token_ids: What the model's configuration says ends a text, beside what the tokenizer's does.

    Raises:
        CheckpointError: it is missing, broken, or of a kind that is not served; the message says which are.
    """
    if source.kind == "gguf":
        from fitment_engine.tokenizer.gguf import from_metadata

        return from_metadata(source.metadata, eos_token_ids)
    if source.kind == "hf":
        from fitment_engine.tokenizer.huggingface import from_files

        return from_files(source.files, eos_token_ids)
    raise CheckpointError(f"tokenizer: source {source.kind!r} is not served; served are gguf and hf")
