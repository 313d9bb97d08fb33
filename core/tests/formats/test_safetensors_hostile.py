"""Safetensors files and folders that were damaged or made to harm; the library safetensors decides which files are sound."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fitment.errors import FitmentError
from fitment.formats import CheckpointError, recognise

SOME = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def file(header: object, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (4,), offsets: object = (0, 16), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "the file is empty"),
    "no header": (b"\1\0\0", "a header of 1 bytes in a file of 3"),
    "header length": (file({}, length=2**64 - 1), "a header of 18446744073709551615 bytes"),
    "header longer than the file": (file({}, length=19), "a header of 19 bytes in a file of 26"),
    "no object": (file(b"[]"), r"the header starts with b'\['"),
    "space first": (file(b" {}"), "the header starts with b' '"),
    "no JSON": (file(b"{,}"), "not valid JSON"),
    "no UTF-8": (file(b'{"\xff": 1}'), "can't decode byte 0xff"),
    "name twice": (file(b'{"a": {}, "a": {}}'), "the name 'a' appears twice"),
    "deep": (file(b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "JSON nested too deeply"),
    "metadata": (file({"__metadata__": {"format": 1}, "a": entry()}), "__metadata__ is .*, wanted an object of strings"),
    "no entry": (file({"a": None}), "tensor 'a' is None, wanted an object"),
    "dtype": (file({"a": entry("F31")}), "tensor 'a' has dtype 'F31', wanted one of F32"),
    "dtype of another type": (file({"a": entry([])}), r"dtype \[\], wanted one of"),
    "no shape": (file({"a": entry(shape=None)}), "shape None, wanted a list of sizes"),
    "negative shape": (file({"a": entry(shape=[-4])}), r"shape \[-4\]"),
    "shape of floats": (file({"a": entry(shape=[4.0])}), r"shape \[4\.0\]"),
    "shape of flags": (file({"a": entry(shape=[True])}), r"shape \[True\]"),
    "dimension": (file({"a": entry(shape=[2**63])}), r"shape \[9223372036854775808\]"),
    "dimensions": (file({"a": entry(shape=[1] * 65)}), r"shape \[1, 1"),
    "product that wraps": (file({"a": entry(shape=[2**62 + 1, 4])}), "16 bytes of data for shape .* takes 590295810358705651840 bits"),
    "product of many": (file({"a": entry(shape=[2**62] * 64)}), "16 bytes of data for shape"),
    "half a byte": (file({"a": entry("F4", [3], [0, 1])}, bytes(1)), "1 bytes of data for shape .3. of F4, which takes 12 bits"),
    "one offset": (file({"a": entry(offsets=[0])}), r"data_offsets \[0\], wanted \[begin, end\]"),
    "offsets backwards": (file({"a": entry(offsets=[16, 0])}), r"data_offsets \[16, 0\]"),
    "offset": (file({"a": entry(offsets=[0, 2**64])}), r"data_offsets \[0, 18446744073709551616\]"),
    "past the end": (file({"a": entry("U8", [17], [0, 17])}), "the tensors end at byte 87 of a file of 86; it is cut off"),
    "far past the end": (file({"a": entry("U8", [2**40], [0, 2**40])}), "the tensors end at byte 1099511627"),
    "hole before": (file({"a": entry("U8", [15], [1, 16])}), "tensor 'a' starts at byte .* and leaves a hole before it"),
    "hole after": (file({"a": entry("U8", [15], [0, 15])}), "the tensors end at byte .* it is cut off or damaged"),
    "overlap": (file({"a": entry(), "b": entry("U8", [8], [8, 16])}), "tensor 'b' starts at byte .* and overlaps the tensor before it"),
    "the same place": (file({"a": entry(), "b": entry()}), "overlaps the tensor before it"),
    "name that cannot be printed": (file({"\x1b[2J": entry()}), r"tensor '\\x1b\[2J' has a name that cannot be printed"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_wrong_is_named(tmp_path: Path, write_config: Callable[..., Path], case: str) -> None:
    content, wanted = HOSTILE[case]
    path = write_config() / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=wanted) as caught:
        recognise(tmp_path)
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000


OpenInLittleMemory = Callable[[Iterable[bytes], str], tuple[int, str]]


def test_nothing_is_allocated_for_what_a_header_claims(
    write_config: Callable[..., Path], open_in_little_memory: OpenInLittleMemory
) -> None:
    write_config()
    assert open_in_little_memory((content for content, _ in HOSTILE.values()), ".safetensors") == (0, "")


def probe(folder: Path) -> bool:
    """Open the folder and read all that it says it has; whether that went well. Anything but a FitmentError fails the test."""
    try:
        checkpoint = recognise(folder)
        for name, info in checkpoint.tensors.items():
            if info.spec is not None:
                weight = checkpoint.read(name)
                assert weight.shape == info.shape
                weight.dequantize().sum()  # touches every byte
    except FitmentError:
        return False
    return True


def agrees(folder: Path, content: bytes) -> None:
    """What we open, the library opens: with the same tensors."""
    (folder / "model.safetensors").write_bytes(content)
    if probe(folder):
        theirs = {name: (value["dtype"], tuple(value["shape"]), len(value["data"]))
                  for name, value in safetensors.deserialize(content)}  # type: ignore[no-untyped-call]
        assert {name: (info.encoding, info.shape, info.nbytes) for name, info in recognise(folder).tensors.items()} == theirs


@pytest.fixture
def small(write_config: Callable[..., Path]) -> Path:
    """A folder of an architecture whose tensors are not looked at, so that damage to a header is all that can be noticed."""
    return write_config(model_type="other")


WHOLE = file({"__metadata__": {"format": "pt"}, "one": entry("F16", [2, 3], [0, 12]), "two": entry("F32", [1], [12, 16]),
              "none": entry("BF16", [0], [16, 16])})


def test_a_file_cut_off_anywhere_is_refused(small: Path) -> None:
    path = small / "model.safetensors"
    path.write_bytes(WHOLE)
    assert probe(small)
    for end in range(len(WHOLE)):
        path.write_bytes(WHOLE[:end])
        with pytest.raises(CheckpointError):
            recognise(small)


def test_a_model_cut_off_anywhere_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    for end in sorted(random.Random(0).sample(range(path.stat().st_size), 200), reverse=True):
        os.truncate(path, end)
        with pytest.raises(CheckpointError):
            recognise(folder)


@SOME
@given(data=st.data())
def test_flipped_bits(small: Path, data: st.DataObject) -> None:
    content = bytearray(WHOLE)
    for bit in data.draw(st.lists(st.integers(0, 8 * len(WHOLE) - 1), min_size=1, max_size=3)):
        content[bit // 8] ^= 1 << bit % 8
    agrees(small, bytes(content))


@SOME
@given(data=st.data())
def test_bytes_put_in_or_left_out(small: Path, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(WHOLE)))
    agrees(small, WHOLE[:at] + data.draw(st.binary(max_size=8)) + WHOLE[at + data.draw(st.integers(0, 8)):])


SIZE = st.integers(0, 17) | st.sampled_from((-1, 2**31, 2**63 - 1, 2**63, 2**64, True, 1.0, None, "1"))
ENTRY = st.builds(entry, st.sampled_from(("F32", "F16", "BF16", "U8", "F4", "F64", "X", None)), st.lists(SIZE, max_size=3),
                  st.lists(SIZE, max_size=3))
FITTING = st.integers(0, 8).map(lambda half: {"a": entry("F16", [half], [0, 2 * half]), "b": entry("U8", [16 - 2 * half], [2 * half, 16])})
HEADER = FITTING | st.dictionaries(st.sampled_from(("a", "b", "__metadata__")), ENTRY | st.none() | st.dictionaries(st.text(), st.text()))


@SOME
@given(HEADER, st.sampled_from((b"", bytes(16), bytes(17))))
def test_made_up_headers(small: Path, header: dict[str, Any], data: bytes) -> None:
    agrees(small, file(header, data))


VALUE = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from((0, 1, 2, 4, 2**63)),
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=5)
ROPE = st.dictionaries(st.sampled_from(("type", "rope_type", "factor", "low_freq_factor", "beta_fast", "rope_theta", "truncate")),
                       VALUE | st.sampled_from(("linear", "yarn", "llama3", "default", 1.0, 8.0)), max_size=5)
CHANGES = st.dictionaries(st.sampled_from((
    "architectures", "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "eos_token_id",
    "bos_token_id", "tie_word_embeddings", "sliding_window", "partial_rotary_factor", "quantization_config", "attention_bias", "hidden_act",
)), VALUE | ROPE, min_size=1, max_size=3)


@SOME
@given(CHANGES)
def test_any_configuration(folder: Path, write_config: Callable[..., Path], changes: dict[str, Any]) -> None:
    write_config(**changes)
    probe(folder)


@SOME
@given(VALUE | st.dictionaries(st.just("weight_map"), VALUE | st.dictionaries(
    st.sampled_from(("one", "two", "x")), VALUE | st.sampled_from(("a.safetensors", "../a.safetensors", ".", "\0.safetensors")))))
def test_any_index(small: Path, index: object) -> None:
    (small / "a.safetensors").write_bytes(WHOLE)
    (small / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (small / "model.safetensors").unlink(missing_ok=True)
    probe(small)
