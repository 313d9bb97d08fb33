"""What a checkpoint format is: it recognises its files, describes them from headers, and reads tensors one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fitment.description import ModelDescription, TokenizerSource
from fitment.errors import FitmentError
from fitment.weights.specs import WeightSpec

if TYPE_CHECKING:
    from fitment.weights.dense import Dense
    from fitment.weights.group_affine import GroupAffine


class CheckpointError(FitmentError):
    """A checkpoint that is broken or not served; the message names the file, the field, the value and what was wanted."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its checkpoint's headers describe it.

    ``name`` is Hugging Face's (``model.layers.0.self_attn.q_proj.weight``) whatever the file calls it; ``shape`` is
    ``(rows, cols)`` or ``(n,)``; ``encoding`` the format's own word for the type (``Q4_1``, ``BF16``); ``spec`` is None when the
    format recognises the encoding and does not read it; ``nbytes`` what the tensor takes in the file.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    spec: WeightSpec | None
    nbytes: int


class Checkpoint(ABC):
    """An open checkpoint: described from its headers; weights are read when asked for, by memory map.

    Attributes:
        path: The file or directory that was opened.
        format: The name of its format.
        model: What it says of its model.
        tensors: Its tensors by (Hugging Face) name, in the order of the file.
        tokenizer: Where its tokenizer is.
    """

    path: Path
    format: str
    model: ModelDescription
    tensors: Mapping[str, TensorInfo]
    tokenizer: TokenizerSource

    @abstractmethod
    def read(self, name: str) -> Dense | GroupAffine:
        """Read one tensor into its family, in Hugging Face's row order.

        Raises:
            CheckpointError: there is no such tensor, its encoding is not served, or its bytes are wrong.
        """

    @abstractmethod
    def release(self, name: str) -> None:
        """Let go of the memory that reading ``name`` brought in from its file.

        What was read stays valid, and comes from the file again when it is looked at; what was written into it is lost. For
        loaders that have copied a tensor: else a process holds a large checkpoint twice.
        """

    def unserved(self) -> list[str]:
        """A sentence for each encoding in the checkpoint that this format recognises and does not read."""
        names: dict[str, list[str]] = {}
        for info in self.tensors.values():
            if info.spec is None:
                names.setdefault(info.encoding, []).append(info.name)
        return [f"{len(tensors)} tensors are {encoding} (first: {tensors[0]}), which {self.format} does not read yet"
                for encoding, tensors in names.items()]


class Format(ABC):
    """A checkpoint format.

    Attributes:
        name: The module's name.
        title: One line for a table.
        specs: What it reads, by its own word for the encoding: ``{"Q4_1": GroupAffineSpec(…)}``.
        recognised: Encodings that it knows by name and does not read.
    """

    name: str
    title: str
    specs: Mapping[str, WeightSpec]
    recognised: tuple[str, ...] = ()

    @abstractmethod
    def matches(self, path: Path) -> bool:
        """Whether ``path`` looks like this format, from its name and first bytes; never raises for a readable path."""

    @abstractmethod
    def open(self, path: Path) -> Checkpoint:
        """Describe the checkpoint from its headers.

        Raises:
            CheckpointError: what is wrong with it, all at once where that is possible.
        """
