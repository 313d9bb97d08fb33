"""Tokenizers from a GGUF file's metadata (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from fitment.errors import Problems
from fitment.formats.base import CheckpointError
from fitment_engine.tokenizer.base import Tokenizer, byte_level, known_stops, sentencepiece

PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = _WORD % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
_GPT4O = _WORD % ((_CONTRACTIONS + "?",) * 2) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL

_FAMILIES: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2 phi-2 mpt olmo jais trillion roberta-bpe": ((_GPT2,), False),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": ((r"\p{N}", _GPT2), False),
    "llama-bpe llama3 llama-v3 falcon3 pixtral lfm2": ((_LLAMA3,), True),
    "qwen2 stablelm2 deepseek-r1-qwen megrez hunyuan": ((_QWEN2,), False),
    "tekken": ((_TEKKEN,), True),
    "gpt-4o llama4": ((_GPT4O,), False),
    "falcon": ((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"), False),
    "default": ((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), False),
}
"""Pre-tokenizers by the names that files give them: the expressions that split one after the other, and whether a piece that is a
token needs no merges. Source: ``llm_tokenizer_bpe`` in llama.cpp's src/llama-vocab.cpp."""

PRE_TOKENIZERS = {name: family for names, family in _FAMILIES.items() for name in names.split()}


def from_metadata(metadata: Mapping[str, Any], eos_token_ids: Iterable[int] = ()) -> Tokenizer:
    """The tokenizer that ``tokenizer.ggml.*`` describes: model ``gpt2`` (byte-level BPE) or ``llama`` (SentencePiece's BPE).

    Raises:
        CheckpointError: a value is missing, of a wrong type, or not served.
    """
    fields = _Fields(metadata)
    kind = fields.text("model", required=True)
    tokens = fields.array("tokens", str)
    types = fields.array("token_type", int, required=False) or [1] * len(tokens)
    if len(types) != len(tokens):
        fields.problems.append(f"{PREFIX}token_type has {len(types)} entries, {PREFIX}tokens {len(tokens)}")
    if kind == "gpt2":
        build = _byte_level_bpe
    elif kind == "llama":
        build = _sentencepiece_bpe
    else:
        fields.problems.append(f"{PREFIX}model is {kind!r}; served are 'gpt2' and 'llama'")
    fields.check()
    library = build(fields, tokens)
    special = frozenset(i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN))
    library.add_tokens([AddedToken(tokens[i], normalized=False) for i, kind in enumerate(types) if kind == _USER_DEFINED and tokens[i]])
    library.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in sorted(special) if tokens[i]])
    bos, eos = fields.token("bos_token_id", len(tokens)), fields.token("eos_token_id", len(tokens))
    stops = {eos, fields.token("eot_token_id", len(tokens)), fields.token("eom_token_id", len(tokens)), *eos_token_ids}
    stops |= known_stops([token if i in special else None for i, token in enumerate(tokens)])
    template = metadata.get("tokenizer.chat_template")
    is_llama = kind == "llama"
    adds_bos = fields.flag("add_bos_token", is_llama or PRE_TOKENIZERS.get(fields.text("pre"), ((), False))[1])
    strips = is_llama and fields.flag("add_space_prefix", True)
    fields.check()
    return Tokenizer(
        library, sentencepiece if is_llama else byte_level, special, frozenset(token for token in stops if token is not None), bos,
        adds_bos, strips, tokens[bos] if bos is not None else "", tokens[eos] if eos is not None else "",
        template if isinstance(template, str) else None)


class _Fields:
    """Typed look-ups under ``tokenizer.ggml.``; what is wrong is gathered."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.problems: list[str] = []

    def check(self) -> None:
        if self.problems:
            raise CheckpointError(str(Problems("tokenizer metadata", self.problems)))

    def _wrong(self, name: str, value: Any, wanted: str) -> None:
        self.problems.append(f"{PREFIX}{name} is {type(value).__name__} {str(value)[:40]!r}, wanted {wanted}")

    def text(self, name: str, required: bool = False) -> str:
        value = self._metadata.get(PREFIX + name, None if required else "")
        if not isinstance(value, str):
            self._wrong(name, value, "a text")
            return ""
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(PREFIX + name, default)
        if not isinstance(value, bool):
            self._wrong(name, value, "true or false")
            return default
        return value

    def array(self, name: str, kind: type, required: bool = True) -> list[Any]:
        value = self._metadata.get(PREFIX + name, None if required else [])
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(item) is kind for item in value):
            self._wrong(name, value, f"an array of {kind.__name__}")
            return []
        return list(value)

    def token(self, name: str, count: int) -> int | None:
        value = self._metadata.get(PREFIX + name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < count:
            self._wrong(name, value, f"a token id below {count}")
            return None
        return value


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Ids by token; of tokens that are there twice the first counts, and the later ones can only be decoded."""
    found: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if token in found:
            token = f"{token}\0{i}"
        found[token] = i
    return found


def _byte_level_bpe(fields: _Fields, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    pre = fields.text("pre") or "default"
    if pre not in PRE_TOKENIZERS:
        fields.problems.append(f"{PREFIX}pre is {pre!r}; served are {', '.join(sorted(PRE_TOKENIZERS))}")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.array("merges", str)]
    vocabulary = _vocabulary(tokens)
    wrong = next((pair for pair in merges if len(pair) != 2 or any(part not in vocabulary for part in (*pair, "".join(pair)))), None)
    if wrong is not None:
        fields.problems.append(f"{PREFIX}merges has {' '.join(wrong)[:40]!r}, whose parts or result are no tokens")
    fields.check()
    expressions, ignores_merges = PRE_TOKENIZERS[pre]
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignores_merges))
    splits = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in expressions]
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    return library


def _sentencepiece_bpe(fields: _Fields, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """SentencePiece merges the pair that makes the token with the best score; as ranked merges, as transformers converts them."""
    scores = fields.array("scores", float)
    if len(scores) != len(tokens):
        fields.problems.append(f"{PREFIX}scores has {len(scores)} entries, {PREFIX}tokens {len(tokens)}")
    unknown = fields.token("unknown_token_id", len(tokens))
    has_prefix = fields.flag("add_space_prefix", True)
    fields.check()
    vocabulary = _vocabulary(tokens)
    library = tokenizers.Tokenizer(models.BPE(
        vocab=vocabulary, merges=_merges(tokens, scores, vocabulary), byte_fallback=True, fuse_unk=True,
        unk_token=tokens[unknown] if unknown is not None else None))
    steps = [normalizers.Prepend("▁")] if has_prefix else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    return library


MAX_MERGED_CHARACTERS = 256


def _merges(tokens: Sequence[str], scores: Sequence[float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, min(len(token), MAX_MERGED_CHARACTERS)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
