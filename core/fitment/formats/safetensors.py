"""safetensors with Hugging Face's configuration: a directory, or a file or index with ``config.json`` beside it. Unquantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fitment.formats import _llama_layout
from fitment.formats._files import find, read_json, refusal, shown
from fitment.formats._huggingface import describe_huggingface, tokenizer_source
from fitment.formats._safetensors_reader import BITS, MAX_HEADER_BYTES, SafetensorsFile, StoredTensor
from fitment.formats.base import Checkpoint, CheckpointError, Format, TensorInfo
from fitment.weights.specs import DenseSpec

if TYPE_CHECKING:
    from fitment.weights.dense import Dense

SPECS = {"F32": DenseSpec("fp32"), "F16": DenseSpec("fp16"), "BF16": DenseSpec("bf16")}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint(Checkpoint):
    """An open directory, file or index."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        directory = path if path.is_dir() else path.parent
        problems: list[str] = []
        model = describe_huggingface(directory, problems)
        self._stored = _open_tensors(path)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tensor.shape, tensor.dtype, SPECS.get(tensor.dtype), tensor.nbytes)
            for name, (_, tensor) in self._stored.items()}
        self.model = _llama_layout.settle(path, model, problems, {name: info.shape for name, info in self.tensors.items()})
        self.tokenizer = tokenizer_source(directory)

    def read(self, name: str) -> Dense:
        """Read one tensor; it lies on the file's map (writes to it stay in memory) where the file aligns it.

        Raises:
            CheckpointError: there is no such tensor, its dtype is not served, or the file has been cut off.
        """
        import torch

        from fitment.dtypes import torch_dtype
        from fitment.weights.dense import Dense

        info = find(self.path, self.tensors, name, SPECS)
        assert isinstance(info.spec, DenseSpec)
        dtype = torch_dtype(info.spec.dtype)
        if not info.nbytes:
            return Dense(torch.empty(info.shape, dtype=dtype))
        file, tensor = self._stored[name]
        raw: memoryview | bytearray = file.view(tensor)
        if tensor.offset % dtype.itemsize:
            raw = bytearray(raw)
        return Dense(torch.frombuffer(raw, dtype=dtype).view(info.shape))

    def release(self, name: str) -> None:
        """See :meth:`Checkpoint.release`."""
        file, tensor = self._stored[name]
        file.release(tensor)


def _open_tensors(path: Path) -> dict[str, tuple[SafetensorsFile, StoredTensor]]:
    """Every tensor by name, with the file that holds it."""
    if not path.is_dir():
        return _indexed(path) if path.suffix == ".json" else _all_of(SafetensorsFile(path))
    if (path / SINGLE).exists():
        return _all_of(SafetensorsFile(path / SINGLE))
    if (path / INDEX).exists():
        return _indexed(path / INDEX)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if len(files) == 1:
        return _all_of(SafetensorsFile(path / files[0]))
    raise CheckpointError(f"{path}: has neither {SINGLE} nor {INDEX}, and which of its {len(files)} other *.safetensors files belong "
                          f"together cannot be told; give one of them, or fetch {INDEX}")


def _all_of(file: SafetensorsFile) -> dict[str, tuple[SafetensorsFile, StoredTensor]]:
    return {name: (file, tensor) for name, tensor in file.tensors.items()}


def _is_shard_name(name: object) -> bool:
    """A plain name of a file beside the index: no path, so that an index cannot point out of its directory."""
    return (isinstance(name, str) and name.isprintable() and name.endswith(".safetensors") and not name.startswith(".")
            and not any(separator in name for separator in "/\\:") and len(name) <= 255)


def _indexed(path: Path) -> dict[str, tuple[SafetensorsFile, StoredTensor]]:
    """The tensors that the index at ``path`` names, from the shards beside it."""
    weight_map = read_json(path, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is {shown(weight_map)}, wanted an object from tensor names to files")
    wrong = [f"weight_map puts {shown(name)} into {shown(shard)}, wanted the name of a *.safetensors file beside the index"
             for name, shard in weight_map.items() if not _is_shard_name(shard)]
    if wrong:
        raise refusal(path, wrong)
    names = sorted(set(weight_map.values()))
    missing = [f"the shard {name} is missing; fetch it" for name in names if not path.with_name(name).exists()]
    if missing:
        raise refusal(path, missing)
    shards = {name: SafetensorsFile(path.with_name(name)) for name in names}
    absent = [f"{shard} does not hold {shown(name)}, which weight_map puts there"
              for name, shard in weight_map.items() if name not in shards[shard].tensors]
    if absent:
        raise refusal(path, absent)
    return {name: (shards[shard], shards[shard].tensors[name]) for name, shard in weight_map.items()}


class Safetensors(Format):
    """The format; see the module."""

    name = "safetensors"
    title = "safetensors, unquantized (Hugging Face)"
    specs = SPECS
    recognised = tuple(dtype for dtype in BITS if dtype not in SPECS)

    def matches(self, path: Path) -> bool:
        """A ``*.safetensors`` file, an index of them, or a directory with either."""
        try:
            if path.is_dir():
                return (path / INDEX).exists() or any(path.glob("*.safetensors"))
            return path.is_file() and path.name.endswith((".safetensors", ".safetensors.index.json"))
        except (OSError, ValueError):
            return False

    def open(self, path: Path) -> SafetensorsCheckpoint:
        """Describe the checkpoint from its configuration and headers.

        Raises:
            CheckpointError: a file is missing or damaged, or configuration and tensors contradict each other.
        """
        try:
            return SafetensorsCheckpoint(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error


FORMAT = Safetensors()
