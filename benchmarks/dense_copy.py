"""Write a checkpoint as a dense bf16 Hugging Face directory, for engines that read nothing else.

    .venv/bin/python benchmarks/dense_copy.py MODEL DIRECTORY

There is no tokenizer in it: what runs it here is fed token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from fitment.formats import recognise


def dense_copy(model: str, directory: Path) -> str:
    """Write it unless it is there; returns the directory."""
    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        checkpoint = recognise(model)
        tensors = {name: checkpoint.read(name).dequantize(torch.bfloat16).contiguous() for name in checkpoint.tensors}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        of = checkpoint.model
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
            "vocab_size": of.vocab_size, "hidden_size": of.hidden_size, "intermediate_size": of.intermediate_size,
            "num_hidden_layers": of.num_layers, "num_attention_heads": of.num_heads, "num_key_value_heads": of.num_kv_heads,
            "head_dim": of.head_size, "rms_norm_eps": of.rms_norm_eps, "rope_theta": of.rope_theta,
            "max_position_embeddings": of.max_position, "tie_word_embeddings": of.tie_embeddings, "bos_token_id": 1, "eos_token_id": 2,
        }
        (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return str(directory)


if __name__ == "__main__":
    from fitment_engine.fetch import resolve

    dense_copy(str(resolve(sys.argv[1])), Path(sys.argv[2]))
