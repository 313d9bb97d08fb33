"""Tokenizers rebuilt from GGUF metadata, against the tokenizers library that the vocabulary came from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from fitment.description import TokenizerSource
from fitment.formats.base import CheckpointError
from fitment_engine.tokenizer import Tokenizer, tokenizer_for
from fitment_engine.tokenizer.base import byte_alphabet
from fitment_engine.tokenizer.gguf import PRE_TOKENIZERS

SPECIAL = ["<|end|>", "<|start|>"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "It's 12345 o'clock; we're late!", "def f(x):\n    return x  # ünïcode\n",
          "日本語のテキスト と 中文", "emoji 🙂🙃 and 👩‍👩‍👧", "a\u0301 combining e\u0301", "tabs\tand\r\nlines\n\n\n  spaces   "] * 4
AWKWARD = [*CORPUS[:7], "", " ", "  a", "a  ", "\n", "I'LL we'Ve", "3.14159 2024-01-01", "<|end|>", "x<|start|>y", "\x00\x7f", "ﬁ ﬃ ½ Ⅻ",
           "مرحبا بالعالم", "🙂" * 5, "a" * 300]


def trained() -> tokenizers.Tokenizer:
    """A small byte-level BPE tokenizer that splits digits, then as GPT-2 does: what GGUF files call smollm."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    library.train_from_iterator(CORPUS, trainer)
    return library


def metadata(library: tokenizers.Tokenizer, pre: str = "smollm") -> dict[str, Any]:
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens], "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.chat_template": "{{ messages }}"}


LIBRARY = trained()
REBUILT = tokenizer_for(TokenizerSource("gguf", metadata(LIBRARY)))


def plain_ids(text: str) -> list[int]:
    """What the library gives when special tokens in a text are text."""
    LIBRARY.encode_special_tokens = True
    return list(LIBRARY.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", AWKWARD, ids=lambda text: repr(text)[:20])
def test_ids_are_the_librarys(text: str) -> None:
    assert REBUILT.encode(text) == plain_ids(text)
    assert REBUILT.decode(REBUILT.encode(text), skip_special=False) == text


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back(text: str) -> None:
    ids = REBUILT.encode(text)
    assert ids == plain_ids(text)
    assert REBUILT.decode(ids) == text
    assert streamed(REBUILT, ids) == text


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(detokenizer.add(token) for token in ids) + detokenizer.finish()


def test_half_a_character_waits_for_its_other_half() -> None:
    ids = REBUILT.encode("🙃")
    assert len(ids) > 1
    detokenizer = REBUILT.detokenizer()
    assert [detokenizer.add(token) for token in ids] == [""] * (len(ids) - 1) + ["🙃"]
    assert detokenizer.finish() == ""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-5, 700), max_size=30))
def test_any_ids_decode_and_stream_alike(ids: list[int]) -> None:
    assert streamed(REBUILT, ids) == REBUILT.decode(ids)


def test_a_text_cannot_smuggle_control_tokens_in() -> None:
    assert 0 not in REBUILT.encode("x<|end|>y")
    assert REBUILT.encode("x<|end|>y", parse_special=True).count(0) == 1


def test_special_tokens_are_skipped_and_known() -> None:
    assert REBUILT.decode([0, 1]) == ""
    assert REBUILT.decode([0, 1], skip_special=False) == "<|end|><|start|>"
    assert (REBUILT.bos_token, REBUILT.eos_token, REBUILT.chat_template) == ("<|start|>", "<|end|>", "{{ messages }}")
    assert REBUILT.stop_token_ids == {0}
    assert REBUILT.encode("a", add_bos=True)[0] == 1
    assert not REBUILT.adds_bos


def test_more_end_tokens_come_from_the_model() -> None:
    assert tokenizer_for(TokenizerSource("gguf", metadata(LIBRARY)), (5, 7)).stop_token_ids == {0, 5, 7}


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_every_text(pre: str) -> None:
    """Whatever an expression leaves out must not get lost, and digits are split as it says."""
    tokenizer = tokenizer_for(TokenizerSource("gguf", metadata(LIBRARY, pre)))
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_expressions_split_as_published() -> None:
    """Pieces of the published expressions of GPT-2 and Llama 3, by hand."""
    def pieces(pre: str, text: str) -> list[str]:
        found = [text]
        for expression in PRE_TOKENIZERS[pre][0]:
            split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
            found = [piece for part in found for piece, _ in split.pre_tokenize_str(part)]
        return found

    assert pieces("gpt-2", "It's 12345  x") == ["It", "'s", " 12345", " ", " x"]
    assert pieces("smollm", "a 123") == ["a", " ", "1", "2", "3"]
    assert pieces("llama-bpe", "It'S 12345!\n\nx") == ["It", "'S", " ", "123", "45", "!\n\n", "x"]
    assert pieces("qwen2", "ab 123") == ["ab", " ", "1", "2", "3"]
    assert pieces("tekken", "camelCase 12") == ["camel", "Case", " ", "1", "2"]


def sentencepiece_metadata() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)),
              "▁", "a", "b", "c", "ab", "▁a", "▁ab", "abc", "▁abc", "▁b"]
    types = [2, 3, 3] + [6] * 256 + [1] * 10
    scores = [0.0] * 3 + [0.0] * 256 + [-9.0, -9.0, -9.0, -9.0, -1.0, -3.0, -2.0, -5.0, -4.0, -6.0]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0}


def best_merges(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as its paper has it: merge the neighbours whose joint piece has the best score, until none has."""
    parts = list(text)
    while True:
        best = max(((scores[a + b], -i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in scores), default=None)
        if best is None:
            return parts
        i = -best[1]
        parts[i:i + 2] = [parts[i] + parts[i + 1]]


def test_sentencepiece_merges_by_score() -> None:
    data = sentencepiece_metadata()
    tokenizer = tokenizer_for(TokenizerSource("gguf", data))
    pieces = data["tokenizer.ggml.tokens"]
    scores = dict(zip(pieces[259:], data["tokenizer.ggml.scores"][259:], strict=True))
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choice("abc ") for _ in range(rng.randint(1, 12)))
        wanted = best_merges("▁" + text.replace(" ", "▁"), scores)
        assert tokenizer.encode(text) == [1, *(pieces.index(piece) for piece in wanted)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = tokenizer_for(TokenizerSource("gguf", sentencepiece_metadata()))
    assert tokenizer.decode(tokenizer.encode("zé🙂")) == "zé🙂"
    assert tokenizer.adds_bos


WRONG: dict[str, tuple[str, Any]] = {
    "an unknown model": ("model", "wordpiece"), "a model of a wrong type": ("model", 5), "an unknown pre-tokenizer": ("pre", "klingon"),
    "tokens that are no texts": ("tokens", [1, 2]), "no tokens": ("tokens", None), "types too few": ("token_type", [1]),
    "merges of no tokens": ("merges", ["zzzz yyyy"]), "merges without a gap": ("merges", ["ab"]),
    "an end token outside": ("eos_token_id", 10**6),
    "a negative token": ("bos_token_id", -1), "a flag that is a number": ("add_bos_token", 3),
}


@pytest.mark.parametrize(("name", "value"), WRONG.values(), ids=WRONG)
def test_wrong_metadata_is_named(name: str, value: Any) -> None:
    data = {**metadata(LIBRARY), f"tokenizer.ggml.{name}": value}
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{name}"):
        tokenizer_for(TokenizerSource("gguf", data))


def files(folder: Path, library: tokenizers.Tokenizer, **config: Any) -> TokenizerSource:
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return TokenizerSource("hf", files={name: str(folder / name) for name in ("tokenizer.json", "tokenizer_config.json")})


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    source = files(tmp_path, LIBRARY, eos_token="<|end|>", bos_token={"content": "<|start|>"}, add_bos_token=True, chat_template="x")
    tokenizer = tokenizer_for(source, (9,))
    assert tokenizer.encode("the 12") == [1, *plain_ids("the 12")]
    assert tokenizer.stop_token_ids == {0, 9}
    assert tokenizer.chat_template == "x"
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.decode(tokenizer.encode("ünï 🙂")) == "ünï 🙂"


def test_a_sentencepiece_folder(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "▁a": 2, "<0x0A>": 3}, merges=[("▁", "a")], byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = tokenizer_for(files(tmp_path, library, eos_token="</s>"))
    assert tokenizer.encode("a a\n") == [2, 2, 3]
    assert tokenizer.decode([2, 2, 3]) == "a a\n"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 5}', "\x00"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_for(TokenizerSource("hf", files={"tokenizer.json": str(tmp_path / "tokenizer.json")}))


def test_a_missing_file_is_told_how_to_make() -> None:
    with pytest.raises(CheckpointError, match="save_pretrained"):
        tokenizer_for(TokenizerSource("hf", files={"tokenizer.model": "x"}))


def test_the_alphabet_has_every_byte() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
