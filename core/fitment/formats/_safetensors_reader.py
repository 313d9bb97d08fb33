"""The safetensors container: a JSON header over a memory map, checked as the library checks it, without importing it or torch.

Layout (https://github.com/huggingface/safetensors#format): a u64 with the header's length, the header (a JSON object from names to dtype,
shape and data_offsets), and the data, which the tensors fill without holes or overlaps.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from fitment.formats._files import MappedFile, parse_json, refusal, shown
from fitment.formats.base import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The library's limit, ``MAX_HEADER_SIZE``."""

BITS = {
    "F32": 32, "F16": 16, "BF16": 16, "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64,
}
"""Bits of an element, by the header's word for its type."""


class StoredTensor(NamedTuple):
    """A tensor of a file; ``offset`` counts from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile(MappedFile):
    """An open file.

    Attributes:
        tensors: Its tensors by name, in the order of the header.
    """

    def __init__(self, path: Path) -> None:
        """Read the header of ``path``.

        Raises:
            CheckpointError: it is no safetensors file, or one that is damaged.
        """
        super().__init__(path)
        header, start = self._header()
        problems: list[str] = []
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            problems.append(f"__metadata__ is {shown(metadata)}, wanted an object of strings")
        stored = [tensor for name, entry in header.items() if (tensor := _entry(name, entry, start, problems))]
        if not problems:
            problems = _coverage(stored, start, len(self.buffer))
        if problems:
            raise refusal(path, problems)
        self.tensors = {tensor.name: tensor for tensor in stored}

    def _header(self) -> tuple[dict[str, Any], int]:
        """The header and where the data starts."""
        size = len(self.buffer)
        length = int.from_bytes(self.buffer[:8], "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{self.path}: no safetensors file, or cut off: a header of {length} bytes in a file of {size} "
                                  f"(at most {MAX_HEADER_BYTES} are read); fetch it again")
        if self.buffer[8:9] != b"{":
            raise CheckpointError(f"{self.path}: no safetensors file: the header starts with {self.buffer[8:9]!r}, wanted b'{{'")
        return parse_json(self.buffer[8:8 + length], f"{self.path}: the header"), 8 + length


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(name: str, entry: object, start: int, problems: list[str]) -> StoredTensor | None:
    """A header entry as a tensor, or None and a problem."""
    if not isinstance(entry, dict):
        problems.append(f"tensor {shown(name)} is {shown(entry)}, wanted an object")
        return None
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    wrong = []
    if not isinstance(dtype, str) or dtype not in BITS:
        wrong.append(f"dtype {shown(dtype)}, wanted one of {', '.join(BITS)}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(_is_size, shape)):
        wrong.append(f"shape {shown(shape)}, wanted a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        wrong.append(f"data_offsets {shown(offsets)}, wanted [begin, end]")
    if not name.isprintable() or not name:
        wrong.append("a name that cannot be printed")
    if not wrong:
        assert isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)
        bits, nbytes = prod(shape) * BITS[dtype], offsets[1] - offsets[0]
        if bits == 8 * nbytes:
            return StoredTensor(name, dtype, tuple(shape), start + offsets[0], nbytes)
        wrong.append(f"{nbytes} bytes of data for shape {shown(shape)} of {dtype}, which takes {shown(bits)} bits")
    problems.append(f"tensor {shown(name)} has {'; '.join(wrong)}")
    return None


def _coverage(tensors: list[StoredTensor], start: int, size: int) -> list[str]:
    """The tensors must fill the file from ``start`` to ``size``, one after the other."""
    position, problems = start, []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            problems.append(f"tensor {tensor.name!r} starts at byte {tensor.offset} and {what}, wanted {position}")
        position = tensor.offset + tensor.nbytes
    if position != size and not problems:
        problems.append(f"the tensors end at byte {position} of a file of {size}; it is cut off or damaged, fetch it again")
    return problems
