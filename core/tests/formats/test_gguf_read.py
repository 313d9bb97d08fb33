"""What comes out of GGUF files, against the package gguf: names, rows, values, parts."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from fitment.formats import CheckpointError, formats, recognise
from fitment.formats._ggml import TENSOR_TYPES
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine

Array = NDArray[Any]
WriteGGUF = Callable[..., Path]

UP = "blk.0.ffn_up.weight"
HF_UP = "model.layers.0.mlp.up_proj.weight"
READ = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"}


def test_the_type_table_is_the_packages() -> None:
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert {number: tuple(kind) for number, kind in TENSOR_TYPES.items()} == theirs
    assert set(formats()["gguf"].specs) == READ
    assert set(formats()["gguf"].recognised) == {kind.name for kind in GGMLQuantizationType} - READ


def raw_blocks(encoding: str, rows: int, cols: int) -> Array:
    """Random blocks: any code, scales and minimums of any finite half, subnormal and negative ones too."""
    random = np.random.default_rng(7)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]
    blocks = random.integers(0, 256, (rows, cols // block_size, block_bytes), dtype=np.uint8)
    for at in {"Q4_1": (0, 2)}.get(encoding, (0,)):
        halves = random.integers(0, 1 << 16, blocks.shape[:2], dtype=np.uint16)
        halves[(halves & 0x7C00) == 0x7C00] ^= 0x4000  # no infinities, no NaNs
        blocks[:, :, at : at + 2] = halves[:, :, None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("encoding", sorted(READ))
def test_values_are_those_of_the_package(write_gguf: WriteGGUF, quantized: Any, gguf_tensors: dict[str, Array], encoding: str) -> None:
    data = quantized(gguf_tensors[UP], encoding)
    wanted = quants.dequantize(*data).astype(np.float64)
    checkpoint = recognise(write_gguf(tensors={UP: data}))
    info, weight = checkpoint.tensors[HF_UP], checkpoint.read(HF_UP)
    assert info.encoding == encoding
    assert info.shape == weight.shape == gguf_tensors[UP].shape
    assert info.spec == weight.spec == formats()["gguf"].specs[encoding]
    assert info.nbytes == data[0].nbytes == weight.spec.nbytes(*info.shape)
    assert np.array_equal(weight.dequantize().numpy(), wanted)


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1"])
def test_any_block_is_read_as_the_package_reads_it(write_gguf: WriteGGUF, encoding: str) -> None:
    kind = GGMLQuantizationType[encoding]
    raw = raw_blocks(encoding, 96, 64)
    weight = recognise(write_gguf(tensors={UP: (raw, kind)})).read(HF_UP)
    assert isinstance(weight, GroupAffine)
    # The package computes in fp32; here values are exact, so rounding them once gives the same.
    assert np.array_equal(weight.dequantize(torch.float32).numpy(), quants.dequantize(raw, kind))


def test_every_other_type_is_recognised_and_refused(write_gguf: WriteGGUF) -> None:
    others = [kind for kind in GGMLQuantizationType if kind.name not in READ]
    sizes = {kind: gguf.GGML_QUANT_SIZES[kind] for kind in others}
    tensors = {f"t.{kind.name}": (np.zeros((2, 2 * sizes[kind][1]), np.uint8), kind) for kind in others}
    checkpoint = recognise(write_gguf(tensors=tensors, architecture="other"))
    assert {sentence.split()[3] for sentence in checkpoint.unserved()} == {kind.name for kind in others}
    for kind in others:
        info = checkpoint.tensors[f"t.{kind.name}"]
        assert (info.encoding, info.shape, info.spec) == (kind.name, (2, 2 * sizes[kind][0]), None)
        with pytest.raises(CheckpointError, match=rf"t\.{kind.name} is {kind.name} .*read are F32, F16, BF16, Q4_0, Q4_1, Q8_0"):
            checkpoint.read(f"t.{kind.name}")


def test_every_tensor_has_hugging_faces_name_and_rows(write_gguf: WriteGGUF, gguf_tensors: dict[str, Array],
                                                      hf_tensors: dict[str, Array]) -> None:
    checkpoint = recognise(write_gguf())
    assert set(checkpoint.tensors) == set(hf_tensors)
    assert [info.nbytes for info in checkpoint.tensors.values()] == [values.nbytes for values in gguf_tensors.values()]
    # Both are the same random numbers in the same order; q and k are then what a converter would have permuted them from.
    for name, values in hf_tensors.items():
        read = checkpoint.read(name).dequantize(torch.float32).numpy()
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        assert np.array_equal(permuted(read, heads) if heads else read, values), name


def permuted(values: Array, heads: int) -> Array:
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def rotate(x: Array, position: int, rotary_size: int, is_interleaved: bool) -> Array:
    """Rotary embedding of ``x [heads, head_size]`` at a position, as ggml's NORM or as NeoX does it."""
    half = rotary_size // 2
    angles = position * 10000.0 ** (-np.arange(half) / half)
    pairs = np.arange(rotary_size).reshape(-1, 2).T if is_interleaved else np.arange(rotary_size).reshape(2, -1)
    first, second = pairs
    y = x.copy()
    y[:, first] = x[:, first] * np.cos(angles) - x[:, second] * np.sin(angles)
    y[:, second] = x[:, second] * np.cos(angles) + x[:, first] * np.sin(angles)
    return y


@pytest.mark.parametrize("rotary_size", [16, 8])
@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q4_1", "Q8_0"])
def test_half_split_rows_give_the_files_attention_scores(write_gguf: WriteGGUF, quantized: Any, gguf_tensors: dict[str, Array],
                                                         encoding: str, rotary_size: int) -> None:
    stored = {name: quantized(gguf_tensors[name], encoding) for name in ("blk.1.attn_q.weight", "blk.1.attn_k.weight")}
    checkpoint = recognise(write_gguf({"rope.dimension_count": rotary_size}, tensors=stored))
    x = np.random.default_rng(3).standard_normal((2, 64))

    def scores(weights: list[Array], is_interleaved: bool) -> Array:
        q, k = (rotate((w @ x[i]).reshape(-1, 16), 5 + 7 * i, rotary_size, is_interleaved) for i, w in enumerate(weights))
        return np.asarray((q * np.repeat(k, 2, axis=0)).sum(axis=1))

    wanted = scores([quants.dequantize(*data).astype(np.float64) for data in stored.values()], True)
    found = scores([checkpoint.read(f"model.layers.1.self_attn.{name}_proj.weight").dequantize().numpy() for name in "qk"], False)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_biases_of_q_and_k_are_reordered_with_their_rows(write_gguf: WriteGGUF) -> None:
    bias = np.arange(64, dtype=np.float32)
    checkpoint = recognise(write_gguf(tensors={"blk.0.attn_q.bias": bias}))
    assert np.array_equal(permuted(checkpoint.read("model.layers.0.self_attn.q_proj.bias").dequantize().numpy(), 4), bias)
    assert checkpoint.model.unserved == ("tensors = 1 that a llama has no place for (first: 'model.layers.0.self_attn.q_proj.bias')",)


def test_dense_tensors_lie_on_the_map_and_writing_leaves_the_file(write_gguf: WriteGGUF) -> None:
    path = write_gguf()
    checkpoint = recognise(path)
    before = path.read_bytes()
    once, again = checkpoint.read(HF_UP), checkpoint.read(HF_UP)
    assert isinstance(once, Dense) and isinstance(again, Dense)
    assert once.values.data_ptr() == again.values.data_ptr()
    once.values.zero_()
    assert not again.values.any()
    assert path.read_bytes() == before
    del checkpoint, once  # the map stays for as long as a tensor lies on it
    assert again.values.sum() == 0


def test_a_three_dimensional_tensor_is_read_dense_and_refused_quantized(write_gguf: WriteGGUF, quantized: Any) -> None:
    values = np.random.default_rng(2).standard_normal((3, 4, 32), dtype=np.float32)
    checkpoint = recognise(write_gguf(tensors={"dense.weight": values, "experts.weight": quantized(values, "Q8_0")}, architecture="other"))
    assert np.array_equal(checkpoint.read("dense.weight").dequantize().numpy(), values)
    with pytest.raises(CheckpointError, match=r"experts.weight is Q8_0 of shape \(3, 4, 32\), which is not read"):
        checkpoint.read("experts.weight")


def test_an_unknown_name_is_answered_with_those_near_it(write_gguf: WriteGGUF) -> None:
    with pytest.raises(CheckpointError, match=r"tiny.gguf: no tensor 'model.norm'; near it are model.norm.weight"):
        recognise(write_gguf()).read("model.norm")


@pytest.mark.parametrize(("encoding", "at", "what"), [("Q8_0", 0, "scales"), ("Q4_0", 0, "scales"), ("Q4_1", 2, "minimums")])
def test_a_scale_that_is_not_finite_is_refused(write_gguf: WriteGGUF, quantized: Any, gguf_tensors: dict[str, Array], encoding: str,
                                               at: int, what: str) -> None:
    raw, kind = quantized(gguf_tensors[UP], encoding)
    raw[5, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(CheckpointError, match=f"{HF_UP}: 1 of 192 {what} are not finite"):
        recognise(write_gguf(tensors={UP: (raw, kind)})).read(HF_UP)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_rotary_factors_are_finite_and_positive(write_gguf: WriteGGUF, wrong: float) -> None:
    factors = np.array([1, 1, 2, 2, 4, 4, 8, 8], np.float32)
    checkpoint = recognise(write_gguf(tensors={"rope_freqs.weight": factors}))
    assert checkpoint.read("rope_freqs.weight").dequantize().tolist() == factors.tolist()
    factors[3] = wrong
    with pytest.raises(CheckpointError, match="a rotary factor is not finite and positive"):
        recognise(write_gguf(tensors={"rope_freqs.weight": factors})).read("rope_freqs.weight")


def test_the_tokenizers_metadata(write_gguf: WriteGGUF) -> None:
    more: dict[str, Any] = {
        "tokenizer.ggml.tokens": [f"tökén{i}" for i in range(40)], "tokenizer.ggml.scores": [i / 4 for i in range(40)],
        "tokenizer.ggml.token_type": [1] * 40, "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ x }}",
        "own.flags": [True, False],
    }
    source = recognise(write_gguf(more=more)).tokenizer
    assert source.kind == "gguf"
    assert {key: source.metadata[key] for key in more} == more
    assert source.metadata.get("tokenizer.ggml.merges") is None
    assert "tokenizer.ggml.merges" not in source.metadata
    assert type(copy := pickle.loads(pickle.dumps(source.metadata))) is dict
    assert copy == dict(source.metadata)


@pytest.mark.parametrize("kind", [kind for kind in gguf.GGUFValueType if kind.name not in ("STRING", "ARRAY")])
def test_metadata_of_every_type(tmp_path: Path, write_gguf: WriteGGUF, kind: gguf.GGUFValueType) -> None:
    value: Any = {"BOOL": True, "FLOAT32": 0.5, "FLOAT64": 0.1}.get(kind.name, 100 if kind.name.startswith("UINT") else -100)
    writer = gguf.GGUFWriter(path := tmp_path / "x.gguf", "other")
    writer.add_key_value("own.key", value, kind)
    writer.add_key_value("own.array", [value, value], gguf.GGUFValueType.ARRAY, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = recognise(path).tokenizer.metadata
    assert metadata["own.key"] == value
    assert metadata["own.array"] == [value, value]
    assert type(metadata["own.key"]) is type(value)


def test_a_file_that_shrinks_is_refused_and_not_faulted_on(write_gguf: WriteGGUF) -> None:
    path = write_gguf(more={"tokenizer.ggml.tokens": ["a", "b"]})
    checkpoint = recognise(path)
    with path.open("r+b") as file:
        file.truncate(100)
    for name in checkpoint.tensors:
        with pytest.raises(CheckpointError, match="the file shrank to 100 bytes while it was open"):
            checkpoint.read(name)
    with pytest.raises(CheckpointError, match="the file shrank to 100 bytes while it was open"):
        checkpoint.tokenizer.metadata["tokenizer.ggml.tokens"]


@pytest.fixture
def parts(write_gguf: WriteGGUF) -> list[Path]:
    first = write_gguf(name="tiny.gguf", split_max_tensors=9)
    return sorted(first.parent.glob("tiny-*.gguf"))


def test_parts_are_one_model_whichever_is_named(parts: list[Path], gguf_tensors: dict[str, Array]) -> None:
    assert [path.name for path in parts] == ["tiny-00001-of-00003.gguf", "tiny-00002-of-00003.gguf", "tiny-00003-of-00003.gguf"]
    for path in parts:
        checkpoint = recognise(path)
        assert checkpoint.model.num_layers == 2
        assert len(checkpoint.tensors) == len(gguf_tensors)
        assert np.array_equal(checkpoint.read(HF_UP).dequantize(torch.float32).numpy(), gguf_tensors[UP])
        assert np.array_equal(checkpoint.read("lm_head.weight").dequantize().numpy(), gguf_tensors["output.weight"])


def test_parts_that_are_missing_or_mixed_up_are_named(parts: list[Path]) -> None:
    second = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"the part tiny-00002-of-00003\.gguf is missing; fetch it"):
        recognise(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(second)
    with pytest.raises(CheckpointError, match=r"tiny-00002-of-00003.gguf: split.no is 2, wanted 1"):
        recognise(parts[0])
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(CheckpointError, match=r"split.count is 3, so the name must end in -00001-of-00003.gguf"):
        recognise(renamed)


def test_a_part_of_another_model_is_noticed(parts: list[Path], write_gguf: WriteGGUF) -> None:
    others = {f"blk.9.{i}": np.zeros(4, np.float32) for i in range(4)}
    write_gguf(name=parts[1].name, more={"split.no": 1, "split.count": 3}, tensors=others)
    with pytest.raises(CheckpointError, match=r"tiny-00001-of-00003.gguf: split.tensors.count is 21, wanted 37 for these parts"):
        recognise(parts[0])


def test_describing_imports_no_numerics(write_gguf: WriteGGUF) -> None:
    code = ("import sys; from fitment.formats import recognise; c = recognise(sys.argv[1]); c.unserved(); "
            "print(sorted({'torch', 'numpy', 'gguf', 'safetensors'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code, str(write_gguf())], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
