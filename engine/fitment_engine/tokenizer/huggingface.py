"""Tokenizers from a Hugging Face directory's ``tokenizer.json`` and its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from fitment.formats.base import CheckpointError
from fitment_engine.tokenizer.base import Tokenizer, byte_level, known_stops, sentencepiece

MAX_BYTES = 256 << 20


def from_files(files: Mapping[str, str], eos_token_ids: Iterable[int] = ()) -> Tokenizer:
    """The tokenizer in ``files`` (name to path): ``tokenizer.json``, with ``tokenizer_config.json`` and ``chat_template.jinja`` if there.

    Raises:
        CheckpointError: ``tokenizer.json`` is missing or broken, or decodes in a way that is not served.
    """
    if "tokenizer.json" not in files:
        found = ", ".join(files) or "none"
        raise CheckpointError(f"tokenizer: no tokenizer.json beside the checkpoint (tokenizer files there: {found}); save it with "
                              "transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…)")
    path = files["tokenizer.json"]
    text = _read(path)
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: the tokenizers library cannot read it: {error}") from error
    library.no_truncation()
    library.no_padding()
    config = _json(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    decoder = json.loads(library.decoder.__getstate__()) if library.decoder is not None else {}
    token_bytes, strips = _decoding(decoder, path)
    special = frozenset(i for i, token in library.get_added_tokens_decoder().items() if token.special)
    bos, eos = _token(config.get("bos_token")), _token(config.get("eos_token"))
    bos_id = library.token_to_id(bos) if bos else None
    added = {token: library.id_to_token(token) for token in special}
    stops = set(eos_token_ids) | {list(added)[i] for i in known_stops(list(added.values()))}
    if eos and (eos_id := library.token_to_id(eos)) is not None:
        stops.add(eos_id)
    return Tokenizer(library, token_bytes, special, frozenset(stops), bos_id, _adds_bos(library, config, bos_id), strips, bos, eos,
                     _template(files, config))


def _adds_bos(library: tokenizers.Tokenizer, config: Mapping[str, Any], bos_id: int | None) -> bool:
    """What the configuration says, else what the post-processor does."""
    if isinstance(config.get("add_bos_token"), bool):
        return bool(config["add_bos_token"])
    return bos_id is not None and library.encode("a", add_special_tokens=True).ids[:1] == [bos_id]


def _decoding(decoder: Mapping[str, Any], path: str) -> tuple[Any, bool]:
    """How tokens become bytes, and whether a text loses its first space, from the decoder's description."""
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder] if decoder else []
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return byte_level, False
    if "ByteFallback" in kinds or kinds == {"Metaspace"}:
        return sentencepiece, "Strip" in kinds or "Metaspace" in kinds
    found = ", ".join(sorted(map(str, kinds))) or "none"
    raise CheckpointError(f"{path}: its decoder is {found}; served are ByteLevel, and ByteFallback or Metaspace (SentencePiece)")


def _token(value: Any) -> str:
    """A special token of the configuration: a text, or an object with its content."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _template(files: Mapping[str, str], config: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return _read(files["chat_template.jinja"])
    template = config.get("chat_template")
    if template is None and "chat_template.json" in files:
        template = _json(files["chat_template.json"]).get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read(path: str) -> str:
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_BYTES} bytes, which no tokenizer is")
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _json(path: str) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {type(value).__name__} found, wanted an object")
    return value
