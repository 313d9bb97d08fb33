"""GGUF, llama.cpp's format: a file (or several parts) with the model's description, its tokenizer and its tensors.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fitment.description import ModelDescription, TokenizerSource
from fitment.formats import _llama_layout
from fitment.formats._fields import Fields
from fitment.formats._files import find, refusal
from fitment.formats._ggml import TENSOR_TYPES
from fitment.formats._gguf_names import ROPE_FACTORS, Scalars, describe_gguf, huggingface_name
from fitment.formats._gguf_parts import open_parts
from fitment.formats._gguf_reader import MAGIC, GGUFFile, GGUFTensor, Metadata
from fitment.formats.base import Checkpoint, CheckpointError, Format, TensorInfo
from fitment.weights.specs import DenseSpec, GroupAffineSpec, WeightSpec

if TYPE_CHECKING:
    from fitment.weights.dense import Dense
    from fitment.weights.group_affine import GroupAffine

SPECS: dict[str, WeightSpec] = {
    "F32": DenseSpec("fp32"),
    "F16": DenseSpec("fp16"),
    "BF16": DenseSpec("bf16"),
    "Q4_0": GroupAffineSpec(4, 32, "constant", "fp16"),
    "Q4_1": GroupAffineSpec(4, 32, "minimums", "fp16"),
    "Q8_0": GroupAffineSpec(8, 32, "constant", "fp16"),
}

_BLOCK_SIZES = {kind.name: kind.block_size for kind in TENSOR_TYPES.values()}

_INTERLEAVED = ("llama",)
"""Architectures whose files hold the rows of q and k with the two halves of each rotated pair side by side.

Source: ``LlamaModel.permute`` in llama.cpp's convert_hf_to_gguf.py.
"""


class GGUFCheckpoint(Checkpoint):
    """An open GGUF model, in one file or in parts."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        files = open_parts(path)
        self._stored: dict[str, tuple[GGUFFile, GGUFTensor]] = {}
        twice = []
        for file in files:
            for tensor in file.tensors:
                name = huggingface_name(tensor.name)
                if name in self._stored:
                    twice.append(f"tensors {self._stored[name][1].name!r} and {tensor.name!r} are both {name!r}")
                self._stored[name] = file, tensor
        if twice:
            raise refusal(path, twice)
        self.tensors: Mapping[str, TensorInfo] = {name: _info(name, tensor) for name, (_, tensor) in self._stored.items()}
        self.model = self._describe(files[0].metadata)
        self.tokenizer = TokenizerSource("gguf", files[0].metadata)

    def _describe(self, metadata: Metadata) -> ModelDescription:
        shapes = {name: info.shape for name, info in self.tensors.items()}
        problems: list[str] = []
        Fields(Scalars(metadata), problems).text("general.architecture")
        if problems:  # no other key has a name without it
            raise refusal(self.path, problems)
        model = describe_gguf(metadata, shapes, problems)
        if model.architecture in _llama_layout.ARCHITECTURES and model.architecture not in _INTERLEAVED:
            other = f"general.architecture = {model.architecture!r} (llama.cpp's name for it is another, so its rows' order is unknown)"
            model = replace(model, unserved=(*model.unserved, other))
        own = (ROPE_FACTORS,) if model.rope_scaling and model.rope_scaling.kind == "factors" else ()
        model = _llama_layout.settle(self.path, model, problems or self._misplaced(model), shapes, own)
        return replace(model, name=model.name or self.path.stem)

    def _misplaced(self, model: ModelDescription) -> list[str]:
        """Vectors that are quantized, and rotary factors of the wrong length."""
        wrong = [f"{info.name} is a vector of {info.encoding}, wanted F32, F16 or BF16" for info in self.tensors.values()
                 if len(info.shape) == 1 and _BLOCK_SIZES[info.encoding] > 1]
        factors = self.tensors.get(ROPE_FACTORS)
        if factors and factors.shape != (model.rotary_size // 2,):
            wrong.append(f"{ROPE_FACTORS} has shape {factors.shape}, wanted {(model.rotary_size // 2,)}")
        return wrong

    def read(self, name: str) -> Dense | GroupAffine:
        """Read one tensor; dense ones lie on the file's map (writes to them stay in memory), quantized ones are unpacked.

        Raises:
            CheckpointError: there is no such tensor, its encoding is not served, the file has been cut off, or a scale is not finite.
        """
        from fitment.formats import _ggml_unpack

        info = find(self.path, self.tensors, name, SPECS)
        assert info.spec is not None
        file, tensor = self._stored[name]
        try:
            weight = _ggml_unpack.unpack(file.view(tensor), info.encoding, info.shape, info.spec, self._row_order(info))
            if name == ROPE_FACTORS:
                _ggml_unpack.check_divisors(weight)
        except ValueError as error:
            raise CheckpointError(f"{file.path}: {name}: {error}; the file is damaged, fetch or convert it again") from error
        return weight

    def release(self, name: str) -> None:
        """See :meth:`Checkpoint.release`."""
        file, tensor = self._stored[name]
        file.release(tensor)

    def _row_order(self, info: TensorInfo) -> tuple[int, int, int] | None:
        """For q and k of interleaved architectures, the heads, head size and rotated size whose rows change places."""
        if self.model.architecture not in _INTERLEAVED:
            return None
        heads = {"q_proj": self.model.num_heads, "k_proj": self.model.num_kv_heads}.get(info.name.split(".")[-2:][0])
        if heads is None or info.shape[0] != heads * self.model.head_size:  # the model's own are known to have this shape
            return None
        return heads, self.model.head_size, self.model.rotary_size


def _info(name: str, tensor: GGUFTensor) -> TensorInfo:
    spec = SPECS.get(tensor.type.name)
    if isinstance(spec, GroupAffineSpec) and len(tensor.shape) != 2:
        spec = None
    return TensorInfo(name, tensor.shape, tensor.type.name, spec, tensor.nbytes)


class GGUF(Format):
    """The format; see the module."""

    name = "gguf"
    title = "GGUF, versions 2 and 3 (llama.cpp)"
    specs = SPECS
    recognised = tuple(kind.name for kind in TENSOR_TYPES.values() if kind.name not in SPECS)

    def matches(self, path: Path) -> bool:
        """A regular file that starts with ``GGUF`` or is called ``*.gguf``."""
        try:
            if not path.is_file():
                return False
            if path.suffix == ".gguf":
                return True
            with path.open("rb") as file:
                return file.read(4) == MAGIC
        except (OSError, ValueError):
            return False

    def open(self, path: Path) -> GGUFCheckpoint:
        """Describe the file from its header.

        Raises:
            CheckpointError: it is damaged, or its metadata and tensors contradict each other.
        """
        try:
            return GGUFCheckpoint(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error


FORMAT = GGUF()
