"""Safetensors files, shards and folders, against the library safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from fitment.errors import FitmentError
from fitment.formats import CheckpointError, recognise
from fitment.weights.dense import Dense

Array = NDArray[Any]
UP = "model.layers.0.mlp.up_proj.weight"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_those_of_the_library(folder: Path, hf_tensors: dict[str, Array], dtype: torch.dtype) -> None:
    path = folder / "model.safetensors"
    save_file({name: torch.from_numpy(values).to(dtype) for name, values in hf_tensors.items()}, path, {"format": "pt"})
    checkpoint = recognise(folder)
    with safe_open(path, "pt") as file:
        assert set(checkpoint.tensors) == set(file.keys())
        for name, info in checkpoint.tensors.items():
            wanted, weight = file.get_tensor(name), checkpoint.read(name)
            assert isinstance(weight, Dense)
            assert weight.values.dtype == wanted.dtype
            assert torch.equal(weight.values, wanted)
            assert (info.shape, info.spec, info.nbytes) == (wanted.shape, weight.spec, wanted.numel() * wanted.itemsize)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32", "int64", "float64", "bool"])
def test_other_types_are_recognised_and_refused(folder: Path, hf_tensors: dict[str, Array], dtype: str) -> None:
    tensors = {name: torch.from_numpy(values) for name, values in hf_tensors.items()}
    tensors[UP] = torch.zeros(96, 64, dtype=getattr(torch, dtype))
    save_file(tensors, folder / "model.safetensors")
    checkpoint = recognise(folder)
    info = checkpoint.tensors[UP]
    assert (info.spec, info.shape) == (None, (96, 64))
    assert checkpoint.unserved() == [f"1 tensors are {info.encoding} (first: {UP}), which safetensors does not read yet"]
    with pytest.raises(CheckpointError, match=f"{UP} is {info.encoding} .*read are F32, F16, BF16"):
        checkpoint.read(UP)


def test_tensors_lie_on_the_map_and_writing_leaves_the_file(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    checkpoint = recognise(folder)
    once, again = checkpoint.read(UP), checkpoint.read(UP)
    assert isinstance(once, Dense) and isinstance(again, Dense)
    once.values.zero_()
    assert once.values.data_ptr() == again.values.data_ptr()
    assert (folder / "model.safetensors").read_bytes() == before


def test_scalars_empty_tensors_and_odd_places(tmp_path: Path, write_config: Callable[..., Path]) -> None:
    """The library's own writer aligns; its reader, like ours, reads what is not aligned."""
    values = np.array([1.5, -2.0], np.float32)
    stored = {"a": ("U8", [3], [0, 3]), "b": ("F32", [2], [3, 11]), "c": ("F32", [], [11, 15]), "d": ("F16", [0, 7], [15, 15])}
    header = {name: dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True)) for name, entry in stored.items()}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"abc" + values.tobytes() + values[:1].tobytes())
    checkpoint = recognise(write_config(model_type="other"))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        for name in "bcd":
            weight = checkpoint.read(name)
            assert isinstance(weight, Dense)
            assert torch.equal(weight.values, file.get_tensor(name))
            assert weight.values.data_ptr() % weight.values.itemsize == 0


def test_a_file_that_shrinks_is_refused_and_not_faulted_on(folder: Path) -> None:
    checkpoint = recognise(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(4000)
    with pytest.raises(CheckpointError, match="the file shrank to 4000 bytes while it was open"):
        checkpoint.read("model.layers.1.mlp.up_proj.weight")


def shard(folder: Path, **index: Any) -> Path:
    """Splits ``model.safetensors`` in two, with an index whose fields or entries are replaced."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:10], names[10:]), 1):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number:05}-of-00002.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{number:05}-of-00002.safetensors")
    content = {"metadata": {"total_size": 1}, "weight_map": {**weight_map, **index.pop("entries", {})}, **index}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("named", ["folder", "index", "links"])
def test_shards(folder: Path, hf_tensors: dict[str, Array], named: str) -> None:
    path = shard(folder)
    if named == "links":  # as the hub's cache lays them out
        (store := folder / "blobs").mkdir()
        for file in [*folder.glob("*.safetensors")]:
            file.rename(store / file.stem)
            file.symlink_to(store / file.stem)
    checkpoint = recognise(path if named == "index" else folder)
    assert set(checkpoint.tensors) == set(hf_tensors)
    assert all(np.array_equal(checkpoint.read(name).dequantize(torch.float32).numpy(), values) for name, values in hf_tensors.items())


@pytest.mark.parametrize(("index", "wanted"), [
    ({"entries": {UP: "../model-00001-of-00002.safetensors"}}, r"puts 'model.layers.0.mlp.up_proj.weight' into '\.\./model-00001"),
    ({"entries": {UP: "/etc/passwd"}}, "into '/etc/passwd', wanted the name of a"),
    ({"entries": {UP: "a\\b.safetensors"}}, "into 'a"),
    ({"entries": {UP: "..safetensors"}}, r"into '\.\.safetensors'"),
    ({"entries": {UP: 5}}, "into 5"),
    ({"entries": {UP: "x" * 300 + ".safetensors"}}, "into 'xxx"),
    ({"entries": {UP: "ü" * 200 + ".safetensors"}}, "File name too long|is missing"),
    ({"entries": {UP: "\ud800.safetensors"}}, r"into '\\ud800.safetensors'"),
    ({"entries": {UP: "model-00003-of-00002.safetensors"}}, "the shard model-00003-of-00002.safetensors is missing; fetch it"),
    ({"entries": {"model.extra": "model-00001-of-00002.safetensors"}}, "model-00001-of-00002.safetensors does not hold 'model.extra'"),
    ({"weight_map": None}, "weight_map is None, wanted an object"),
    ({"weight_map": []}, r"weight_map is \[\]"),
    ({"weight_map": {}}, "weight_map is {}"),
])
def test_a_wrong_index_is_refused(folder: Path, index: dict[str, Any], wanted: str) -> None:
    shard(folder, **index)
    with pytest.raises(CheckpointError, match=wanted):
        recognise(folder)


def test_an_index_that_forgets_a_tensor_leaves_the_model_without_it(folder: Path) -> None:
    path = shard(folder)
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["weight_map"][UP]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"1 of 21 tensors are missing: {UP}"):
        recognise(folder)


def test_one_file_of_another_name(folder: Path) -> None:
    path = (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert len(recognise(folder).tensors) == len(recognise(path).tensors) == 21
    shutil.copy(path, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"which of its 2 other \*\.safetensors files belong together cannot be told"):
        recognise(folder)


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be opened"):
        recognise(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FitmentError, match="no format recognises it"):
        recognise(folder)
    with pytest.raises(CheckpointError, match=r"nothing: no such file or directory"):
        recognise(folder / "nothing")
    with pytest.raises(CheckpointError, match="no such file or directory"):
        recognise(f"{folder}/{'x' * 5000}\0")
