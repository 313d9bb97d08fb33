"""What a GGUF file's metadata say of its model, and what is refused and how."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from fitment.description import ModelDescription, RopeScaling
from fitment.formats import CheckpointError, recognise

WriteGGUF = Callable[..., Path]

FACTORS = {"rope_freqs.weight": np.ones(8, np.float32)}
TOKENS = {"tokenizer.ggml.tokens": [str(i) for i in range(40)]}


def model(path: Path) -> ModelDescription:
    return recognise(path).model


def test_a_llama(write_gguf: WriteGGUF) -> None:
    more = {"general.name": "Tiny", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7,
            "tokenizer.ggml.eom_token_id": 2, **TOKENS}
    assert model(write_gguf({"rope.freq_base": 500000.0, "rope.dimension_count": 16}, more)) == ModelDescription(
        architecture="llama", num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_size=16, vocab_size=40,
        max_position=512, rms_norm_eps=float(np.float32(1e-5)), rope_theta=500000.0, rotary_size=16, bos_token_id=1, eos_token_ids=(2, 7),
        name="Tiny")


def test_what_may_be_left_out(write_gguf: WriteGGUF) -> None:
    found = model(write_gguf(tensors={"output.weight": None}))
    assert found.tie_embeddings
    assert (found.rope_theta, found.rotary_size, found.head_size, found.vocab_size) == (10000.0, 16, 16, 40)
    assert (found.name, found.bos_token_id, found.eos_token_ids, found.sliding_window) == ("tiny", None, (), None)


def test_heads_of_another_size_than_the_hidden_sizes_share(write_gguf: WriteGGUF) -> None:
    shapes = {"attn_q": (4 * 8, 64), "attn_k": (2 * 8, 64), "attn_v": (2 * 8, 64), "attn_output": (64, 4 * 8)}
    tensors = {f"blk.{i}.{name}.weight": np.zeros(shape, np.float32) for i in range(2) for name, shape in shapes.items()}
    found = model(write_gguf({"attention.key_length": 8, "attention.value_length": 8}, tensors=tensors))
    assert (found.head_size, found.rotary_size, found.unserved) == (8, 8, ())


def test_every_head_its_own_keys(write_gguf: WriteGGUF) -> None:
    tensors = {f"blk.{i}.attn_{name}.weight": np.zeros((64, 64), np.float32) for i in range(2) for name in "kv"}
    assert model(write_gguf({"attention.head_count_kv": None}, tensors=tensors)).num_kv_heads == 4


@pytest.mark.parametrize(("keys", "tensors", "wanted"), [
    ({}, {}, None),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, None),
    ({"rope.scaling.type": "linear"}, {}, None),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, {}, None),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {}, None),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, RopeScaling("linear", {"factor": 4.0})),
    ({"rope.scaling.factor": 4.0}, {}, RopeScaling("linear", {"factor": 4.0})),
    ({"rope.scale_linear": 2.0}, {}, RopeScaling("linear", {"factor": 2.0})),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}, {},
     RopeScaling("yarn", {"factor": 4.0, "original_max_position_embeddings": 128.0})),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0,
      "rope.scaling.finetuned": True}, {}, RopeScaling("yarn", {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0})),
    ({"rope.scaling.type": "longrope"}, {}, RopeScaling("longrope")),
    ({}, FACTORS, RopeScaling("factors")),
    ({"rope.scaling.type": "none"}, FACTORS, RopeScaling("factors")),
])
def test_rotary_scaling(write_gguf: WriteGGUF, keys: dict[str, Any], tensors: dict[str, Any], wanted: RopeScaling | None) -> None:
    found = model(write_gguf(keys, tensors=tensors))
    assert found.rope_scaling == wanted
    assert found.unserved == ()


def test_rotary_factors_beside_another_scaling_are_unserved(write_gguf: WriteGGUF) -> None:
    found = model(write_gguf({"rope.scaling.factor": 4.0}, tensors=FACTORS))
    assert found.unserved == ("tensors = 1 that a llama has no place for (first: 'rope_freqs.weight')",)


@pytest.mark.parametrize(("key", "neutral", "value", "shown"), [
    ("expert_count", 0, 8, "8"),
    ("attention.value_length", 16, 32, "32"),
    ("logit_scale", 1.0, 0.5, "0.5"),
    ("embedding_scale", 1.0, 12.0, "12.0"),
    ("rope.scaling.attn_factor", 1.0, 1.5, "1.5"),
    ("attention.causal", True, False, "False"),
    ("attn_logit_softcapping", 0.0, 50.0, "50.0"),
    ("attention.max_alibi_bias", 0.0, 8.0, "8.0"),
    ("rope.dimension_sections", 0, [1, 2], "an array of 2 values"),
    ("tensor_data_layout", "Meta AI original pth", None, ""),
])
def test_what_has_no_place_in_a_description_is_unserved(write_gguf: WriteGGUF, key: str, neutral: Any, value: Any, shown: str) -> None:
    assert model(write_gguf({key: neutral})).unserved == ()
    if value is not None:
        assert model(write_gguf({key: value})).unserved == (f"llama.{key} = {shown}",)


def test_a_mixture_of_experts_is_described_though_its_layers_are_others(write_gguf: WriteGGUF) -> None:
    ffn = dict.fromkeys(f"blk.{i}.ffn_{name}.weight" for i in range(2) for name in ("gate", "up", "down"))
    experts = {f"blk.{i}.ffn_{name}_exps.weight": np.zeros((8, 32, 64), np.float32) for i in range(2) for name in ("gate", "up")}
    found = model(write_gguf({"expert_count": 8, "expert_used_count": 2}, tensors={**ffn, **experts}))
    assert found.unserved == ("llama.expert_count = 8", "llama.expert_used_count = 2")


def test_a_sliding_window(write_gguf: WriteGGUF) -> None:
    assert model(write_gguf({"attention.sliding_window": 128})).sliding_window == 128


@pytest.mark.parametrize("architecture", ["bert", "qwen2", "mamba", "gemma3"])
def test_another_architecture_is_described_as_far_as_it_goes(write_gguf: WriteGGUF, architecture: str) -> None:
    missing = ("attention.layer_norm_rms_epsilon", "attention.head_count") if architecture in ("bert", "mamba") else ()
    checkpoint = recognise(write_gguf(dict.fromkeys(missing), tensors={"blk.0.ssm.weight": np.zeros((2, 3, 4), np.float32)},
                                      architecture=architecture))
    assert (checkpoint.model.architecture, checkpoint.model.num_layers, checkpoint.model.hidden_size) == (architecture, 2, 64)
    assert any(item.startswith(f"values = 2 that are missing or wrong (first: {architecture}.attention.head_count is missing")
               for item in checkpoint.model.unserved) == bool(missing)
    assert checkpoint.tensors["blk.0.ssm.weight"].shape == (2, 3, 4)


def test_an_architecture_that_gguf_calls_llama_is_unserved_by_its_own_name(write_gguf: WriteGGUF) -> None:
    found = model(write_gguf(architecture="mistral"))
    assert found.architecture == "mistral"
    assert found.unserved[0].startswith("general.architecture = 'mistral'")


@pytest.mark.parametrize(("keys", "more", "wanted"), [
    ({"block_count": None}, {}, "llama.block_count is missing, wanted an integer in 1..10000"),
    ({"block_count": 10**9}, {}, "llama.block_count is 1000000000, wanted an integer in 1..10000"),
    ({"block_count": 0}, {}, "llama.block_count is 0, wanted"),
    ({"block_count": 2.0}, {}, r"llama.block_count is 2\.0, wanted an integer"),
    ({"embedding_length": 2**63}, {}, "llama.embedding_length is 9223372036854775808, wanted"),
    ({"embedding_length": "64"}, {}, "llama.embedding_length is '64', wanted an integer"),
    ({"embedding_length": 66}, {}, "llama.embedding_length, llama.attention.head_count: 66 is not a multiple of 4"),
    ({"attention.head_count": 0}, {}, "llama.attention.head_count is 0, wanted"),
    ({"attention.head_count": [4, 4]}, {}, "llama.attention.head_count is an array of 2 values, wanted an integer"),
    ({"attention.head_count_kv": 3}, {}, "llama.attention.head_count, llama.attention.head_count_kv: 4 is not a multiple of 3"),
    ({"attention.layer_norm_rms_epsilon": None}, {}, "llama.attention.layer_norm_rms_epsilon is missing"),
    ({"attention.layer_norm_rms_epsilon": float("nan")}, {}, "llama.attention.layer_norm_rms_epsilon is nan, wanted a number above 0"),
    ({"attention.layer_norm_rms_epsilon": 0.0}, {}, r"llama.attention.layer_norm_rms_epsilon is 0\.0"),
    ({"rope.freq_base": float("inf")}, {}, "llama.rope.freq_base is inf, wanted a number above 1"),
    ({"rope.freq_base": -1.0}, {}, r"llama.rope.freq_base is -1\.0"),
    ({"rope.dimension_count": 18}, {}, "llama.attention.head_count, llama.rope.dimension_count: 18 elements of a head of 16"),
    ({"rope.dimension_count": 7}, {}, "7 elements of a head of 16 are rotated, wanted an even number"),
    ({"rope.scaling.type": "yarn"}, {}, "rotary scaling of type 'yarn' has no factor"),
    ({"rope.scaling.factor": -2.0}, {}, r"llama.rope.scaling.factor is -2\.0"),
    ({"rope.scaling.factor": float("nan")}, {}, "llama.rope.scaling.factor is nan"),
    ({"rope.scaling.type": 3}, {}, "llama.rope.scaling.type is 3, wanted a short printable string"),
    ({"attention.sliding_window": "x"}, {}, "llama.attention.sliding_window is 'x'"),
    ({"context_length": None}, {}, "llama.context_length is missing"),
    ({"vocab_size": 39}, {}, r"model.embed_tokens.weight has shape \(40, 64\), wanted \(39, 64\)"),
    ({"vocab_size": 39}, TOKENS, "tokenizer.ggml.tokens has 40 entries, more than llama.vocab_size 39"),
    ({}, {**TOKENS, "tokenizer.ggml.scores": [1.0]}, "tokenizer.ggml.scores has 1 entries for 40 tokens"),
    ({}, {"tokenizer.ggml.eos_token_id": 40}, r"tokenizer.ggml.eos_token_id is 40, wanted token ids in 0\.\.39"),
    ({}, {"tokenizer.ggml.bos_token_id": [1]}, "tokenizer.ggml.bos_token_id is an array of 1 values"),
    ({}, {"general.type": "adapter"}, "general.type is 'adapter', wanted 'model'"),
    ({}, {"general.alignment": 12}, "general.alignment is 12, wanted a power of two from 8 on"),
    ({}, {"general.alignment": "32"}, "general.alignment is '32'"),
    ({}, {"general.architecture": "lla\x1bma"}, r"general.architecture is 'lla\\x1bma', wanted a short printable string"),
    ({}, {"general.architecture": 5}, "general.architecture is 5"),
    ({}, {"split.count": 10**9}, "split.count is 1000000000, wanted"),
    ({}, {"llama.\x1b[2J": 1}, r"a metadata key is 'llama\.\\x1b\[2J', wanted a printable name"),
])
def test_wrong_metadata_is_named_with_what_was_wanted(write_gguf: WriteGGUF, keys: dict[str, Any], more: dict[str, Any],
                                                      wanted: str) -> None:
    with pytest.raises(CheckpointError, match=wanted) as caught:
        model(write_gguf(keys, more))
    assert "tiny.gguf" in str(caught.value)


def test_all_problems_at_once(write_gguf: WriteGGUF) -> None:
    with pytest.raises(CheckpointError) as caught:
        model(write_gguf({"block_count": None, "attention.head_count": 0}, {"tokenizer.ggml.eos_token_id": 99}))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("tiny.gguf: 3 problems")
    assert [line.split()[0] for line in lines[1:]] == ["llama.attention.head_count", "llama.block_count", "tokenizer.ggml.eos_token_id"]


def test_layers_without_tensors_are_counted(write_gguf: WriteGGUF) -> None:
    with pytest.raises(CheckpointError, match=r"89982 of 90003 tensors are missing: model.layers.2.input_layernorm.weight, .*, …$"):
        model(write_gguf({"block_count": 10_000}))
    with pytest.raises(CheckpointError, match=r"1 of 21 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight$"):
        model(write_gguf(tensors={"blk.1.ffn_up.weight": None}))


@pytest.mark.parametrize(("tensors", "wanted"), [
    ({"blk.0.ffn_up.weight": np.zeros((64, 96), np.float32)}, r"mlp.up_proj.weight has shape \(64, 96\), wanted \(96, 64\)"),
    ({"output_norm.weight": (np.zeros(2 * 34, np.uint8), gguf.GGMLQuantizationType.Q8_0)}, "model.norm.weight is a vector of Q8_0, wanted"),
    ({"rope_freqs.weight": np.ones(7, np.float32)}, r"rope_freqs.weight has shape \(7,\), wanted \(8,\)"),
    ({"model.norm.weight": np.ones(64, np.float32)}, "tensors 'output_norm.weight' and 'model.norm.weight' are both 'model.norm.weight'"),
    ({"a\nb": np.ones(64, np.float32)}, r"a tensor name is 'a\\nb', wanted a printable name"),
])
def test_wrong_tensors_are_named(write_gguf: WriteGGUF, tensors: dict[str, NDArray[Any]], wanted: str) -> None:
    with pytest.raises(CheckpointError, match=wanted):
        model(write_gguf(tensors=tensors))


@pytest.mark.parametrize(("version", "wanted"), [
    (0, "is GGUF version 0, served are 2, 3"),
    (1, "is GGUF version 1, served are 2, 3; convert the model again"),
    (4, "is GGUF version 4, served are 2, 3"),
    (3 << 24, "is big-endian, which is not served; convert it with gguf-convert-endian"),
])
def test_other_versions_are_refused(write_gguf: WriteGGUF, version: int, wanted: str) -> None:
    path = write_gguf()
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=wanted):
        recognise(path)


def test_big_endian_files_are_refused(write_gguf: WriteGGUF) -> None:
    with pytest.raises(CheckpointError, match="is big-endian"):
        recognise(write_gguf(endianess=gguf.GGUFEndian.BIG))


def test_version_two_is_read(write_gguf: WriteGGUF) -> None:
    path = write_gguf()
    path.write_bytes(b"GGUF" + struct.pack("<I", 2) + path.read_bytes()[8:])
    assert model(path).num_layers == 2


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_other_alignments_are_read(write_gguf: WriteGGUF, gguf_tensors: dict[str, NDArray[Any]], tmp_path: Path, alignment: int) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "x.gguf", "other")
    writer.add_custom_alignment(alignment)
    for name, values in gguf_tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = recognise(path)
    assert np.array_equal(checkpoint.read("lm_head.weight").dequantize().numpy(), gguf_tensors["output.weight"])


@pytest.mark.parametrize(("content", "wanted"), [
    (b"", "the file is empty"), (b"GGML\3\0\0\0", "starts with b'GGML'"), (b"GG", "starts with b'GG'"),
])
def test_what_is_no_gguf(tmp_path: Path, content: bytes, wanted: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=wanted):
        recognise(path)


def test_a_file_is_recognised_by_its_first_bytes(write_gguf: WriteGGUF) -> None:
    path = write_gguf()
    assert recognise(path.rename(path.with_name("blob-1234"))).format == "gguf"
