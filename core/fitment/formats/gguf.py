"""GGUF, llama.cpp's format: one file with the model's description, its tokenizer and its tensors.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from fitment.description import ModelDescription, TokenizerSource
from fitment.formats import _llama_layout
from fitment.formats._fields import Fields
from fitment.formats._files import refusal
from fitment.formats._ggml import TENSOR_TYPES
from fitment.formats._gguf_names import ROPE_FACTORS, Scalars, describe_gguf, huggingface_name
from fitment.formats._gguf_reader import MAGIC, GGUFFile, GGUFTensor
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
    """An open GGUF file."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self._stored: dict[str, GGUFTensor] = {}
        problems: list[str] = []
        for tensor in self._file.tensors:
            name = huggingface_name(tensor.name)
            if name in self._stored:
                problems.append(f"tensors {self._stored[name].name!r} and {tensor.name!r} are both {name!r}")
            self._stored[name] = tensor
        self.tensors: Mapping[str, TensorInfo] = {name: _info(name, tensor) for name, tensor in self._stored.items()}
        self.model = self._describe(problems)
        self.tokenizer = TokenizerSource("gguf", self._file.metadata)

    def _describe(self, problems: list[str]) -> ModelDescription:
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        Fields(Scalars(self._file.metadata), problems).text("general.architecture")
        if problems:  # nothing else can be looked up
            raise refusal(self.path, problems)
        model = describe_gguf(self._file.metadata, shapes, problems)
        unserved = model.unserved
        if not problems and model.architecture in _llama_layout.ARCHITECTURES:
            own = frozenset({ROPE_FACTORS} if model.rope_scaling and model.rope_scaling.kind == "factors" else ())
            problems, extra = _llama_layout.check(model, shapes, own)
            problems += self._misplaced(model)
            unserved += tuple(extra)
        if problems:
            raise refusal(self.path, problems)
        return replace(model, unserved=unserved, name=model.name or self.path.stem)

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

        info = self.tensors.get(name)
        if info is None:
            near = get_close_matches(name, self.tensors, n=3)
            raise CheckpointError(f"{self.path}: no tensor {name!r}" + (f"; near it are {', '.join(near)}" if near else ""))
        if info.spec is None:
            raise CheckpointError(f"{self.path}: {name} is {info.encoding} of shape {info.shape}, which gguf does not read; "
                                  f"read are {', '.join(SPECS)} (quantized ones as matrices); convert with llama-quantize")
        try:
            return _ggml_unpack.unpack(self._file.view(self._stored[name]), info.encoding, info.shape, info.spec, self._row_order(info))
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}; the file is damaged, fetch or convert it again") from error

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
        return GGUFCheckpoint(path)


FORMAT = GGUF()
