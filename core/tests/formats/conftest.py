"""Small checkpoints, written by other libraries than the one under test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType, quants
from numpy.typing import NDArray
from safetensors.torch import save_file

Array = NDArray[Any]

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB, LAYERS = 64, 4, 2, 16, 96, 40, 2

KEYS: dict[str, Any] = {
    "block_count": LAYERS, "embedding_length": HIDDEN, "feed_forward_length": INNER, "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS, "context_length": 512, "attention.layer_norm_rms_epsilon": 1e-5,
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}
IN_LAYER = {
    "input_layernorm": ("attn_norm", (HIDDEN,)),
    "self_attn.q_proj": ("attn_q", (HEADS * HEAD, HIDDEN)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD, HIDDEN)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD, HIDDEN)),
    "self_attn.o_proj": ("attn_output", (HIDDEN, HEADS * HEAD)),
    "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
    "mlp.gate_proj": ("ffn_gate", (INNER, HIDDEN)),
    "mlp.up_proj": ("ffn_up", (INNER, HIDDEN)),
    "mlp.down_proj": ("ffn_down", (HIDDEN, INNER)),
}


def _llama(names: Callable[[int, str, str], str], outside: tuple[str, str, str]) -> dict[str, Array]:
    random = np.random.default_rng(1)
    shapes = {outside[0]: (VOCAB, HIDDEN), outside[1]: (HIDDEN,), outside[2]: (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {names(layer, ours, theirs): shape for ours, (theirs, shape) in IN_LAYER.items()}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.fixture
def gguf_tensors() -> dict[str, Array]:
    """The tensors of a tiny llama by GGUF's names, fp32."""
    return _llama(lambda layer, ours, theirs: f"blk.{layer}.{theirs}.weight", ("token_embd.weight", "output_norm.weight", "output.weight"))


@pytest.fixture
def hf_tensors() -> dict[str, Array]:
    """The tensors of a tiny llama by Hugging Face's names, fp32."""
    return _llama(lambda layer, ours, theirs: f"model.layers.{layer}.{ours}.weight",
                  ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"))


WriteGGUF = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path, gguf_tensors: dict[str, Array]) -> WriteGGUF:
    """Writes a tiny llama with the package gguf and returns its path.

    ``keys`` are the architecture's without its prefix, ``more`` whole ones: values change those of the tiny llama, None removes one.
    ``tensors`` likewise: arrays, or (raw bytes, type). Ints are written as u32 and floats as f32.
    """
    def write(keys: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None,
              tensors: Mapping[str, Any] | None = None, architecture: str = "llama", name: str = "tiny.gguf", **options: Any) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture, **options)
        values = {f"{architecture}.{key}": value for key, value in {**KEYS, **(keys or {})}.items()} | dict(more or {})
        for key, value in values.items():
            if value is not None:
                writer.add_key_value(key, value, _kind(value))
        for tensor, data in {**gguf_tensors, **(tensors or {})}.items():
            if isinstance(data, tuple):
                writer.add_tensor(tensor, data[0], raw_dtype=data[1])
            elif data is not None:
                writer.add_tensor(tensor, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _kind(value: Any) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.UINT32 if value < 1 << 32 else GGUFValueType.UINT64
    return {float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}[type(value)]


@pytest.fixture
def quantized() -> Callable[[Array, str], tuple[Array, GGMLQuantizationType]]:
    """Quantizes an fp32 array with the package gguf, for ``write_gguf``."""
    def quantize(values: Array, encoding: str) -> tuple[Array, GGMLQuantizationType]:
        kind = GGMLQuantizationType[encoding]
        return quants.quantize(values, kind), kind

    return quantize


@pytest.fixture
def folder(tmp_path: Path, hf_tensors: dict[str, Array], write_config: Callable[..., Path]) -> Path:
    """A tiny llama in fp32, written by the library safetensors."""
    save_file({name: torch.from_numpy(values) for name, values in hf_tensors.items()}, tmp_path / "model.safetensors")
    return write_config()


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Writes ``config.json`` of a tiny llama with fields changed (None removes one) and returns its folder."""
    def write(folder: Path = tmp_path, **fields: Any) -> Path:
        config = {key: value for key, value in {**CONFIG, **fields}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    return write


LIMITED = """
import resource, sys
from fitment.formats import CheckpointError, recognise
resource.setrlimit(resource.RLIMIT_AS, (200 << 20,) * 2)
for path in sys.argv[1:]:
    try:
        recognise(path)
    except CheckpointError:
        pass
"""


@pytest.fixture
def open_in_little_memory(tmp_path: Path) -> Callable[[Iterable[bytes], str], tuple[int, str]]:
    """Opens files of these contents and this ending in a process of 200 MB; gives its exit status and what it said of errors."""
    def opened(contents: Iterable[bytes], ending: str) -> tuple[int, str]:
        paths = []
        for i, content in enumerate(contents):
            paths.append(tmp_path / f"{i}{ending}")
            paths[-1].write_bytes(content)
        command = [sys.executable, "-c", LIMITED, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stderr

    return opened
