"""GGUF files that were damaged or made to harm: a CheckpointError, or a checkpoint whose every read stays inside its file."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fitment.errors import FitmentError
from fitment.formats import CheckpointError, recognise

WriteGGUF = Callable[..., Path]

U8, I8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 1, 4, 6, 7, 8, 9, 10
SOME = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MANY = 2**63


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def row(name: bytes = b"t", dims: Sequence[int] = (4,), kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims) if count is None else count, *dims, kind, offset)


def gguf(keys: Sequence[bytes] = (), rows: Sequence[bytes] = (), data: bytes = bytes(64), num_keys: int | None = None,
         num_rows: int | None = None) -> bytes:
    """A file with an architecture; header and data are padded to 32 bytes."""
    architecture = key(b"general.architecture", STRING, text(b"other"))
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(rows) if num_rows is None else num_rows, len(keys) + 1 if num_keys is None else num_keys)
    head += architecture + b"".join(keys) + b"".join(rows)
    return head + bytes(-len(head) % 32) + data


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


HOSTILE: dict[str, tuple[bytes, str]] = {
    "tensor count": (gguf(num_rows=MANY), "claims 9223372036854775808 tensors"),
    "tensor count that would fit": (gguf(num_rows=1 << 17), "claims 131072 tensors, more than 131072 or than fit into the file"),
    "key count": (gguf(num_keys=2**64 - 1), "claims 18446744073709551615 metadata keys"),
    "key length": (gguf([text(b"k", 2**64 - 1)]), "a metadata key is 18446744073709551615 bytes long, at most 65535"),
    "key past the end": (gguf([text(b"k", 60_000)]), "a metadata key needs 60000 bytes"),
    "empty key": (gguf([key(b"", U8, b"1")]), "a metadata key is '', wanted a printable name"),
    "key twice": (gguf([key(b"k", U8, b"1")] * 2), "the metadata key 'k' appears twice"),
    "key that is not UTF-8": (gguf([key(b"\xff\xfe", U8, b"1")]), "a metadata key is not UTF-8"),
    "value type": (gguf([key(b"k", 99, b"1")]), "the value of 'k' has the unknown type 99"),
    "string length": (gguf([key(b"k", STRING, text(b"v", 2**63))]), "the value of 'k' needs 9223372036854775808 bytes"),
    "bool": (gguf([key(b"k", BOOL, b"\2")]), "the value of 'k' has a bool that is neither 0 nor 1"),
    "element type": (gguf([key(b"k", ARRAY, array(13, 1, b"1"))]), "the value of 'k' is an array of the unknown type 13"),
    "array of arrays": (gguf([key(b"k", ARRAY, array(ARRAY, 1, array(U8, 1, b"1")))]), "the value of 'k' is an array of arrays"),
    "array count": (gguf([key(b"k", ARRAY, array(U64, 2**61))]), "the value of 'k' needs 18446744073709551616 bytes"),
    "array of bytes": (gguf([key(b"k", ARRAY, array(U8, 2**40))]), "the value of 'k' needs 1099511627776 bytes"),
    "string count": (gguf([key(b"k", ARRAY, array(STRING, 2**63))]), "the value of 'k' claims 9223372036854775808 strings"),
    "string in an array": (gguf([key(b"k", ARRAY, array(STRING, 2, text(b"v", 2**64 - 1) + text(b"")))]), "has strings that run past"),
    "strings to the end": (gguf([key(b"k", ARRAY, array(STRING, 1, text(b"v", 10_000)))]), "has strings that run past the file's end"),
    "name length": (gguf(rows=[text(b"t", 65)]), "a tensor name is 65 bytes long, at most 64"),
    "name twice": (gguf(rows=[row(), row(offset=32)]), "tensor 't' appears twice"),
    "no dimensions": (gguf(rows=[row(dims=())]), "tensor 't' has 0 dimensions, wanted 1..4"),
    "five dimensions": (gguf(rows=[row(dims=(1,) * 5)]), "tensor 't' has 5 dimensions"),
    "dimension count": (gguf(rows=[row(count=2**32 - 1)]), "tensor 't' has 4294967295 dimensions"),
    "dimension of zero": (gguf(rows=[row(dims=(0, 4))]), r"tensor 't' has shape \(4, 0\)"),
    "dimension": (gguf(rows=[row(dims=(2**63,))]), "tensor 't' ends at byte 36893488147419103"),
    "product that wraps": (gguf(rows=[row(dims=(2**32, 2**32, 2**32, 2**32))]), "it is cut off"),
    "product that wraps to little": (gguf(rows=[row(dims=(2**62 + 1,))]), "it is cut off"),
    "half a block": (gguf(rows=[row(dims=(33,), kind=2)]), "rows of Q4_0 are multiples of 32"),
    "tensor type": (gguf(rows=[row(kind=4)]), "tensor 't' has the type 4, which is none of ggml's"),
    "offset": (gguf(rows=[row(offset=2**64 - 32)]), "it is cut off"),
    "offset off the grid": (gguf(rows=[row(offset=4)]), "starts at 4, which is not a multiple of the alignment 32"),
    "past the end": (gguf(rows=[row(dims=(17,))]), "of a file of 192; it is cut off"),
    "overlap": (gguf(rows=[row(dims=(9,)), row(b"u", offset=32)]), "tensors 't' and 'u' overlap"),
    "the same place": (gguf(rows=[row(), row(b"u")]), "tensors 't' and 'u' overlap"),
    "alignment": (gguf([key(b"general.alignment", U32, struct.pack("<I", 1 << 31))], [row()]), "it is cut off"),
    "no alignment": (gguf([key(b"general.alignment", U32, bytes(4))], [row()]), "general.alignment is 0"),
    "negative alignment": (gguf([key(b"general.alignment", I8, b"\xe0")], [row()]), "general.alignment is -32"),
    "parts": (gguf([key(b"split.count", U64, struct.pack("<Q", MANY))]), "split.count is 9223372036854775808"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    content, wanted = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=wanted) as caught:
        recognise(path)
    assert "hostile.gguf" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_strings_are_counted_over_the_whole_header(tmp_path: Path) -> None:
    half = (1 << 21) + 1
    path = tmp_path / "hostile.gguf"
    path.write_bytes(gguf([key(b"k", ARRAY, array(STRING, half, bytes(8 * half))), key(b"l", ARRAY, array(STRING, half))]))
    with pytest.raises(CheckpointError, match="the value of 'l' claims 2097153 strings, more than the 4194304 that are read in all"):
        recognise(path)


OpenInLittleMemory = Callable[[Iterable[bytes], str], tuple[int, str]]


def test_nothing_is_allocated_for_what_a_header_claims(open_in_little_memory: OpenInLittleMemory) -> None:
    assert open_in_little_memory((content for content, _ in HOSTILE.values()), ".gguf") == (0, "")


def probe(path: Path) -> bool:
    """Open the file and read all that it says it has; whether that went well. Anything but a FitmentError fails the test."""
    try:
        checkpoint = recognise(path)
        for name in checkpoint.tensors:
            try:
                weight = checkpoint.read(name)
            except CheckpointError:
                continue
            assert weight.shape == checkpoint.tensors[name].shape
            weight.dequantize().sum()  # touches every byte
        for metadata_key in checkpoint.tokenizer.metadata:
            checkpoint.tokenizer.metadata[metadata_key]
    except FitmentError:
        return False
    return True


@pytest.fixture
def whole(write_gguf: WriteGGUF, quantized: Any, gguf_tensors: dict[str, Any]) -> bytes:
    """A small file with every kind of thing in it."""
    more = {"tokenizer.ggml.tokens": ["a", "bé", "c"], "tokenizer.ggml.scores": [0.0, 1.0, 2.0], "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.eos_token_id": 2, "general.name": "name"}
    tensors: dict[str, Any] = {"blk.0.ffn_up.weight": quantized(gguf_tensors["blk.0.ffn_up.weight"], "Q4_1"),
                               "blk.1.attn_q.weight": quantized(gguf_tensors["blk.1.attn_q.weight"], "Q8_0")}
    return write_gguf({"rope.scaling.type": "none"}, more, tensors).read_bytes()


def header_end(content: bytes) -> int:
    last = b"blk.1.ffn_down.weight"
    return content.rindex(last) + len(last) + 4 + 2 * 8 + 4 + 8


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    assert probe(path)
    ends = [*range(header_end(whole)), *random.Random(0).sample(range(header_end(whole), len(whole)), 100), len(whole) - 1]
    for end in sorted(ends, reverse=True):
        os.truncate(path, end)
        with pytest.raises(CheckpointError):
            recognise(path)


@SOME
@given(data=st.data())
def test_flipped_bits(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    content = bytearray(whole)
    for bit in data.draw(st.lists(st.integers(0, 8 * header_end(whole) - 1), min_size=1, max_size=4)):
        content[bit // 8] ^= 1 << bit % 8
    (path := tmp_path / "flipped.gguf").write_bytes(content)
    probe(path)


@SOME
@given(data=st.data())
def test_bytes_put_in_or_left_out(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, header_end(whole)))
    content = whole[:at] + data.draw(st.binary(max_size=16)) + whole[at + data.draw(st.integers(0, 16)):]
    (path := tmp_path / "changed.gguf").write_bytes(content)
    probe(path)


@SOME
@given(data=st.data())
def test_numbers_replaced(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    """Eight bytes anywhere become a number that parsers trip over."""
    content = bytearray(whole)
    at = data.draw(st.integers(4, header_end(whole)))
    number = data.draw(st.sampled_from((0, 1, 2, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)))
    content[at : at + 8] = struct.pack("<Q", number)
    (path := tmp_path / "number.gguf").write_bytes(content)
    probe(path)


BYTES = st.binary(max_size=24)
KEY = st.builds(key, st.sampled_from((b"a", b"general.alignment", b"general.name", b"split.count", b"tokenizer.ggml.tokens")),
                st.integers(0, 14), BYTES | st.builds(array, st.integers(0, 14), st.integers(0, 2**64 - 1), BYTES))
ROW = st.builds(row, st.binary(max_size=3), st.lists(st.sampled_from((0, 1, 2, 4, 32, 2**31, 2**63)), max_size=5).map(tuple),
                st.integers(0, 45), st.sampled_from((0, 1, 32, 64, 2**63, 2**64 - 32)))


@SOME
@given(st.builds(gguf, st.lists(KEY, max_size=3), st.lists(ROW, max_size=3), st.binary(max_size=200)))
def test_made_up_files(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "made.gguf").write_bytes(content)
    probe(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe.gguf")
    with pytest.raises(FitmentError, match=r"pipe\.gguf: no format recognises it"):
        recognise(path)
