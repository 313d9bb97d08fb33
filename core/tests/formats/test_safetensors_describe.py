"""Descriptions from Hugging Face configurations, as they are published and as they should not be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from fitment.description import ModelDescription, RopeScaling
from fitment.formats import CheckpointError, recognise

Array = NDArray[Any]
WriteConfig = Callable[..., Path]

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64.0}


def test_a_description(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}", encoding="utf-8")
    checkpoint = recognise(folder)
    assert checkpoint.model == ModelDescription(
        architecture="llama", num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_size=16, vocab_size=40,
        max_position=512, rms_norm_eps=1e-5, rope_theta=10000.0, rotary_size=16, name=folder.name)
    assert checkpoint.tokenizer.kind == "hf"
    assert checkpoint.tokenizer.files == {name: str(folder / name) for name in ("tokenizer.json", "tokenizer_config.json")}


def test_the_ends_are_those_of_both_configurations(folder: Path, write_config: WriteConfig) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 3, 9], "temperature": 0.6}', encoding="utf-8")
    write_config(eos_token_id=3, bos_token_id=1)
    model = recognise(folder).model
    assert (model.bos_token_id, model.eos_token_ids) == (1, (3, 7, 9))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 40]}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"eos_token_id is \[7, 40\], wanted token ids in 0\.\.39"):
        recognise(folder)


def test_tied_embeddings_need_no_output_layer(folder: Path, hf_tensors: dict[str, Array], write_config: WriteConfig) -> None:
    write_config(tie_word_embeddings=True)
    model = recognise(folder).model
    assert (model.tie_embeddings, model.unserved) == (True, ())  # with an output layer, which transformers ignores as well
    del hf_tensors["lm_head.weight"]
    save_file({name: torch.from_numpy(values) for name, values in hf_tensors.items()}, folder / "model.safetensors")
    assert recognise(folder).model.unserved == ()
    write_config()
    with pytest.raises(CheckpointError, match=r"1 of 21 tensors are missing: lm_head\.weight"):
        recognise(folder)


@pytest.mark.parametrize(("fields", "theta", "wanted"), [
    ({"rope_scaling": {"type": "linear", "factor": 4}}, 10000.0, RopeScaling("linear", {"factor": 4.0})),
    ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5, None),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
    ({"rope_scaling": {**LLAMA3, "rope_type": "llama3"}, "rope_theta": 500000}, 5e5, RopeScaling("llama3", LLAMA3)),
    ({"rope_parameters": {**LLAMA3, "rope_type": "llama3", "rope_theta": 5e5}}, 5e5, RopeScaling("llama3", LLAMA3)),
    ({"rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "finetuned": True, "mscale": None}}, 1e4,
     RopeScaling("yarn", {"factor": 16.0, "original_max_position_embeddings": 4096.0})),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "truncate": False}}, 1e4,
     RopeScaling("yarn", {"factor": 2.0, "beta_fast": 32.0, "truncate": 0.0})),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1e4, RopeScaling("dynamic", {"factor": 2.0})),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"factor": 2.0, "rope_type": "linear"}}, 1e4,
     RopeScaling("linear", {"factor": 2.0})),
])
def test_rotary_scaling(folder: Path, write_config: WriteConfig, fields: dict[str, Any], theta: float,
                        wanted: RopeScaling | None) -> None:
    write_config(**fields)
    model = recognise(folder).model
    assert (model.rope_scaling, model.rope_theta, model.unserved) == (wanted, theta, ())


@pytest.mark.parametrize("place", ["rope_parameters", ""])
def test_a_share_of_each_head_is_rotated(folder: Path, write_config: WriteConfig, place: str) -> None:
    fields = {"partial_rotary_factor": 0.5}
    write_config(**({place: fields} if place else fields))
    assert recognise(folder).model.rotary_size == 8


@pytest.mark.parametrize(("fields", "wanted"), [
    ({"architectures": ["MistralForCausalLM"]}, 4096),
    ({"sliding_window": 128}, 128),
])
def test_sliding_windows_of_mistral(folder: Path, write_config: WriteConfig, fields: dict[str, Any], wanted: int | None) -> None:
    write_config(model_type="mistral", **fields)
    assert recognise(folder).model.sliding_window == wanted
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": None}), encoding="utf-8")
    assert recognise(folder).model.sliding_window is None
    write_config(**fields)  # a llama has none, whatever its configuration says
    assert recognise(folder).model.sliding_window is None


@pytest.mark.parametrize(("fields", "wanted"), [
    ({"attention_bias": True}, "attention_bias = True"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures = ['LlamaForSequenceClassification']"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config.quant_method = 'gptq'"),
    ({"quantization_config": {}}, "quantization_config.quant_method = None"),
    ({"quantization_config": "awq"}, "quantization_config.quant_method = 'awq'"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0]}}, "rope_scaling.short_factor = [1.0, 2.0]"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters = {'full_attention': {'rope_theta': 1.0}}"),
])
def test_what_has_no_place_in_a_description_is_unserved(folder: Path, write_config: WriteConfig, fields: dict[str, Any],
                                                        wanted: str) -> None:
    write_config(**fields)
    assert recognise(folder).model.unserved == (wanted,)


def test_tensors_that_a_llama_has_no_place_for_are_unserved(folder: Path, hf_tensors: dict[str, Array]) -> None:
    tensors = {name: torch.from_numpy(values) for name, values in hf_tensors.items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # of old checkpoints; the configuration says the same
    save_file(tensors, folder / "model.safetensors")
    assert recognise(folder).model.unserved == ()
    save_file({**tensors, "score.weight": torch.ones(2, 64)}, folder / "model.safetensors")
    assert recognise(folder).model.unserved == ("tensors = 1 that a llama has no place for (first: 'score.weight')",)


@pytest.mark.parametrize("fields", [{"model_type": "qwen2"}, {"model_type": "llava", "hidden_size": None, "text_config": {}}])
def test_another_architecture_is_described_as_far_as_it_goes(folder: Path, write_config: WriteConfig, fields: dict[str, Any]) -> None:
    write_config(**fields)
    model = recognise(folder).model
    assert (model.architecture, model.num_layers) == (fields["model_type"], 2)
    missing = "values = 1 that are missing or wrong (first: hidden_size is missing, wanted an integer in 1..16777216)"
    assert model.unserved == ((missing,) if "text_config" in fields else ())


@pytest.mark.parametrize(("fields", "wanted"), [
    ({"model_type": None}, "model_type is missing, wanted a short printable string"),
    ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
    ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, wanted an integer in 1\.\.10000"),
    ({"num_hidden_layers": 3}, "9 of 30 tensors are missing: model.layers.2.input_layernorm.weight"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True, wanted an integer"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ({"hidden_size": 64.0}, r"hidden_size is 64\.0, wanted an integer"),
    ({"hidden_size": 10**4000}, "hidden_size is 1000000"),
    ({"hidden_size": 128}, r"model.embed_tokens.weight has shape \(40, 64\), wanted \(40, 128\)"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_attention_heads": 3}, "hidden_size, num_attention_heads: 64 is not a multiple of 3, and head_dim is missing"),
    ({"num_key_value_heads": 3}, "num_attention_heads, num_key_value_heads: 4 is not a multiple of 3"),
    ({"head_dim": 15}, "head_dim: 15 elements of a head of 15 are rotated, wanted an even number"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, wanted a number above 0 and up to 1"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    ({"rope_theta": 0}, "rope_theta is 0, wanted a number above 1"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', wanted true or false"),
    ({"eos_token_id": -1}, r"eos_token_id is -1, wanted token ids in 0\.\.39"),
    ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    ({"eos_token_id": [[1]]}, r"eos_token_id is \[\[1\]\]"),
    ({"bos_token_id": {}}, "bos_token_id is {}"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear', wanted an object or null"),
    ({"rope_scaling": {"type": "linear"}}, "rotary scaling of type 'linear' has no factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0, wanted a number above"),
    ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor is '4'"),
    ({"rope_scaling": {"type": "linear", "factor": 1e308}}, r"factor is 1e\+308"),
    ({"rope_scaling": {"type": 7, "factor": 4}}, "type is 7"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary scaling of type 'llama3' has no low_freq_factor"),
    ({"rope_scaling": {**LLAMA3, "rope_type": "llama3", "low_freq_factor": 4.0}}, "low_freq_factor 4, wanted less than high_freq_factor 4"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, "are both there and differ"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
])
def test_a_wrong_configuration_is_named_with_what_was_wanted(folder: Path, write_config: WriteConfig, fields: dict[str, Any],
                                                             wanted: str) -> None:
    write_config(**fields)
    with pytest.raises(CheckpointError, match=wanted) as caught:
        recognise(folder)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(("content", "wanted"), [
    (b"", "not valid JSON"),
    (b"[]", "holds a JSON list, wanted an object"),
    (b"{", "not valid JSON"),
    (b'{"a": 1, "a": 2}', "the name 'a' appears twice"),
    (b'{"rms_norm_eps": NaN}', "NaN is not JSON"),
    (b'{"rms_norm_eps": -Infinity}', "-Infinity is not JSON"),
    (b'{"a": ' + b"[" * 100_000, "JSON nested too deeply"),
    (b'{"a": ' * 100_000, "JSON nested too deeply"),
    (b'{"a": "\xff"}', "can't decode byte 0xff"),
    (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON: .*digits"),
    (b'{"model_type": "llama", "rms_norm_eps": 1e999}', "rms_norm_eps is inf"),
    ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
    (b"\xef\xbb\xbf{}", "not valid JSON"),
])
def test_a_configuration_that_is_no_json_object(folder: Path, content: bytes, wanted: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json: {wanted}|{wanted}"):
        recognise(folder)


def test_a_configuration_too_long_to_be_one(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"config\.json: 16777217 bytes of JSON, at most 16777216 are read"):
        recognise(folder)
