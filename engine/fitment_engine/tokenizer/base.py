"""What a tokenizer is to the engine: text to ids, ids to bytes, bytes to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import tokenizers

REPLACEMENT = "\ufffd"


@dataclass(eq=False)
class Tokenizer:
    """A tokenizer; not thread-safe.

    Attributes:
        library: The ``tokenizers`` object that encodes.
        token_bytes: The bytes of a token's text by its id and its content.
        special_ids: Control tokens: left out of texts by default, and never made from a prompt's text.
        stop_token_ids: Tokens that end a text.
        bos_token_id: The token that begins a text, or None.
        adds_bos: Whether an encoded text begins with it.
        strips_space: Whether the text of a whole sequence loses one space at its beginning (SentencePiece's added one).
        bos_token: Its content, for chat templates; "" when there is none.
        eos_token: Likewise.
        chat_template: The checkpoint's Jinja template, or None.
    """

    library: tokenizers.Tokenizer
    token_bytes: Callable[[int, str], bytes]
    special_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    bos_token_id: int | None = None
    adds_bos: bool = False
    strips_space: bool = False
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str | None = None
    _bytes: dict[int, bytes] = field(default_factory=dict, repr=False)

    def encode(self, text: str, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """The ids of ``text``.

        Args:
            text: Any text.
            parse_special: Whether control tokens written in the text count as such; without it they are taken as text, so that a
                prompt cannot smuggle them in.
            add_bos: Whether to begin with the start token; None does what the model's own tokenizer does.
        """
        self.library.encode_special_tokens = not parse_special
        ids = list(self.library.encode(_valid(text), add_special_tokens=False).ids)
        if (self.adds_bos if add_bos is None else add_bos) and self.bos_token_id is not None:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        text = b"".join(self.bytes_of(token, skip_special) for token in ids).decode("utf-8", "replace")
        return text[1:] if self.strips_space and text.startswith(" ") else text

    def bytes_of(self, token: int, skip_special: bool) -> bytes:
        """The bytes of one token; none for a special one that is skipped, or for an id that there is not."""
        if skip_special and token in self.special_ids:
            return b""
        found = self._bytes.get(token)
        if found is None:
            content = self.library.id_to_token(token) if 0 <= token < 2**32 else None
            found = self._bytes[token] = b"" if content is None else (
                content.encode("utf-8", "replace") if token in self.special_ids else self.token_bytes(token, content))
        return found

    def detokenizer(self, skip_special: bool = True) -> IncrementalDetokenizer:
        """A detokenizer for one continuation."""
        return IncrementalDetokenizer(self, skip_special)


class IncrementalDetokenizer:
    """Turns a continuation's tokens into text as they come, whole characters only."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The text that ``token`` completes: none while a character lacks bytes."""
        return self._decoder.decode(self._tokenizer.bytes_of(token, self._skip_special))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def _valid(text: str) -> str:
    """``text`` with lone surrogates, which no encoding has, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8") if any("\ud800" <= c <= "\udfff" for c in text) else text


@cache
def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (GPT-2's ``bytes_to_unicode``), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def byte_level(_token: int, content: str) -> bytes:
    """The bytes of a byte-level token; a character outside the alphabet (of an added token) stands for itself."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[c] for c in content])
    except KeyError:
        return content.encode("utf-8", "replace")


def sentencepiece(_token: int, content: str) -> bytes:
    """The bytes of a SentencePiece token: ``▁`` is a space, ``<0xNN>`` a byte."""
    if len(content) == 6 and content.startswith("<0x") and content.endswith(">"):
        try:
            return bytes([int(content[3:5], 16)])
        except ValueError:
            pass
    return content.replace("▁", " ").encode("utf-8", "replace")


def known_stops(contents: Sequence[str | None]) -> set[int]:
    """The places of tokens that end a turn in the chat formats in use, whatever a checkpoint's metadata forgets to say."""
    return {i for i, content in enumerate(contents) if content in _END_OF_TURN}


_END_OF_TURN = frozenset(("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
                          "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>"))
