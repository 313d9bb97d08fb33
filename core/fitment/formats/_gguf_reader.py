"""GGUF's container: metadata and the tensor table over a memory map, every length checked before it is believed.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version (u32), tensor count, key count (u64), the keys with
their values, the tensor table, padding to the alignment, the tensors. Strings are a u64 length and UTF-8 bytes.

Nothing is built from a claimed count: the header is walked, and each step must lie inside the file. Arrays and strings are skipped
over at open and decoded when somebody asks for them, since a vocabulary is nearly all of a header. Arrays of arrays, which llama.cpp
refuses as well, are not served.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fitment.formats._files import MappedFile, check_size, refusal, shown
from fitment.formats._ggml import ARRAY, BOOL, SCALARS, STRING, TENSOR_TYPES, TensorType
from fitment.formats.base import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_STRINGS = 1 << 22
"""Strings in arrays, over a whole header: each costs a step, and no vocabulary comes near."""

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_SIZES = {kind: struct.calcsize(f"<{code}") for kind, code in SCALARS.items()}


class GGUFTensor(NamedTuple):
    """A row of the tensor table; ``shape`` is outermost first (in the file: innermost), ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


class _Cursor:
    """A position in the header that cannot leave the file."""

    def __init__(self, path: Path, buffer: mmap.mmap, position: int = 0) -> None:
        self.path = path
        self.buffer = buffer
        self.end = len(buffer)
        self.position = position
        self.strings_left = MAX_STRINGS

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem} (at byte {self.position} of {self.end})")

    def skip(self, nbytes: int, what: str) -> int:
        """Step over ``nbytes`` bytes and return where they began."""
        start = self.position
        if nbytes > self.end - start:
            raise self.fail(f"{what} needs {nbytes} bytes, {self.end - start} are left; the file is cut off or damaged")
        self.position = start + nbytes
        return start

    def u32(self, what: str) -> int:
        value: int = _U32(self.buffer, self.skip(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64(self.buffer, self.skip(8, what))[0]
        return value

    def name(self, what: str, limit: int) -> str:
        """A string that messages will show."""
        name = self.string(what, limit)
        if not name or not name.isprintable():
            raise self.fail(f"{what} is {shown(name)}, wanted a printable name")
        return name

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(f"the length of {what}")
        if limit is not None and length > limit:
            raise self.fail(f"{what} is {length} bytes long, at most {limit} are allowed")
        start = self.skip(length, what)
        try:
            return self.buffer[start:self.position].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason}") from error

    def array_head(self, what: str) -> tuple[int, int]:
        """An array's element type and count."""
        kind = self.u32(f"the element type of {what}")
        count = self.u64(f"the count of {what}")
        if kind not in SCALARS and kind != STRING:
            found = "arrays, which is not served" if kind == ARRAY else f"the unknown type {kind}"
            raise self.fail(f"{what} is an array of {found}; the file is damaged or newer than this version")
        return kind, count

    def skip_value(self, kind: int, what: str) -> None:
        """Step over one value; what it claims to hold must lie inside the file."""
        if kind in SCALARS:
            self.skip(_SIZES[kind], what)
        elif kind == STRING:
            self.skip(self.u64(f"the length of {what}"), what)
        elif kind == ARRAY:
            kind, count = self.array_head(what)
            if kind == STRING:
                self._skip_strings(count, what)
            else:
                self.skip(count * _SIZES[kind], what)
        else:
            raise self.fail(f"{what} has the unknown type {kind}; the file is damaged or newer than this version")

    def _skip_strings(self, count: int, what: str) -> None:
        # The hot loop of opening a file: positions only grow, so one that leaves the file is caught by the next read or at the end.
        if count > self.strings_left:
            raise self.fail(f"{what} claims {count} strings, more than the {MAX_STRINGS} that are read in all")
        self.strings_left -= count
        buffer, position = self.buffer, self.position
        try:
            for _ in range(count):
                position += _U64(buffer, position)[0] + 8
        except (struct.error, OverflowError):
            position = self.end + 1
        if position > self.end:
            raise self.fail(f"{what} has strings that run past the file's end; the file is cut off or damaged")
        self.position = position

    def value(self, kind: int, what: str) -> Any:
        """Decode one value that :meth:`skip_value` accepted: int, float, bool, str or a list of them."""
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            kind, count = self.array_head(what)
            return [self.string(what) for _ in range(count)] if kind == STRING else self._scalars(kind, count, what)
        return self._scalars(kind, 1, what)[0]

    def _scalars(self, kind: int, count: int, what: str) -> list[Any]:
        start = self.skip(count * _SIZES[kind], what)
        if kind == BOOL and self.buffer[start:self.position].strip(b"\0\1"):
            raise self.fail(f"{what} has a bool that is neither 0 nor 1")
        return list(struct.unpack_from(f"<{count}{SCALARS[kind]}", self.buffer, start))


class Metadata(Mapping[str, Any]):
    """A GGUF file's keys and values; strings and arrays are decoded from the file at each look-up, numbers once at open.

    Look-ups raise KeyError as a dict does, and CheckpointError for a value that is not UTF-8 or whose file has been cut off.
    Pickling gives a plain dict.
    """

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self._values: dict[str, Any] = {}
        self._places: dict[str, tuple[int, int, int]] = {}

    def _add(self, key: str, kind: int, cursor: _Cursor) -> None:
        what = f"the value of {shown(key)}"
        start = cursor.position
        if kind in SCALARS:
            self._values[key] = cursor.value(kind, what)
        else:
            cursor.skip_value(kind, what)
        self._places[key] = (kind, start, cursor.position)

    def __getitem__(self, key: str) -> Any:
        if key in self._values:
            return self._values[key]
        kind, start, end = self._places[key]
        check_size(self._path, self._buffer, end)
        return _Cursor(self._path, self._buffer, start).value(kind, f"the value of {shown(key)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __reduce__(self) -> tuple[Callable[..., dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)

    def is_array(self, key: str) -> bool:
        """Whether ``key`` is there and holds an array."""
        return key in self._places and self._places[key][0] == ARRAY

    def count(self, key: str) -> int:
        """How many elements the array at ``key`` has, without decoding it; 0 where there is no such array."""
        if not self.is_array(key):
            return 0
        return _Cursor(self._path, self._buffer, self._places[key][1]).array_head(key)[1]


class GGUFFile(MappedFile):
    """An open GGUF file.

    Attributes:
        version: 2 or 3.
        metadata: Its keys and values.
        tensors: Its tensor table, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        """Walk the header of ``path``.

        Raises:
            CheckpointError: it is no little-endian GGUF of version 2 or 3, or its header is damaged.
        """
        super().__init__(path)
        cursor = _Cursor(path, self.buffer)
        self.version, num_tensors, num_keys = _head(cursor)
        self.metadata = Metadata(path, self.buffer)
        for _ in range(num_keys):
            key = cursor.name("a metadata key", MAX_KEY_BYTES)
            if key in self.metadata:
                raise cursor.fail(f"the metadata key {shown(key)} appears twice")
            self.metadata._add(key, cursor.u32(f"the type of {shown(key)}"), cursor)
        rows = [_table_row(cursor) for _ in range(num_tensors)]
        self.tensors = _place(path, rows, cursor.position, _alignment(path, self.metadata), len(self.buffer))


def _head(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, tensor count and key count."""
    magic = bytes(cursor.buffer[:4])
    if magic != MAGIC:
        raise cursor.fail(f"starts with {magic!r}, a GGUF file starts with {MAGIC!r}")
    cursor.position = 4
    version = cursor.u32("the version")
    if version and not version & 0xFFFF:
        raise cursor.fail("is big-endian, which is not served; convert it with gguf-convert-endian of the package gguf")
    if version not in VERSIONS:
        raise cursor.fail(f"is GGUF version {version}, served are {', '.join(map(str, VERSIONS))}; convert the model again")
    num_tensors, num_keys = cursor.u64("the tensor count"), cursor.u64("the key count")
    for count, limit, smallest, what in ((num_tensors, MAX_TENSORS, 32, "tensors"), (num_keys, MAX_KEYS, 13, "metadata keys")):
        if count > limit or count * smallest > cursor.end:
            raise cursor.fail(f"claims {count} {what}, more than {limit} or than fit into the file; it is damaged")
    return version, num_tensors, num_keys


def _alignment(path: Path, metadata: Metadata) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {shown(alignment)}, wanted a power of two from 8 on")
    return alignment


def _table_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, dimensions (outermost first), type number and offset of one tensor, as the file has them."""
    name = cursor.name("a tensor name", MAX_NAME_BYTES)
    what = f"the table row of tensor {name!r}"
    num_dimensions = cursor.u32(what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {num_dimensions} dimensions, wanted 1..{MAX_DIMENSIONS}")
    dimensions = struct.unpack_from(f"<{num_dimensions}Q", cursor.buffer, cursor.skip(8 * num_dimensions, what))
    return name, dimensions[::-1], cursor.u32(what), cursor.u64(what)


def _place(path: Path, rows: list[tuple[str, tuple[int, ...], int, int]], header_end: int, alignment: int,
           file_size: int) -> list[GGUFTensor]:
    """Check the table against the file: known types, whole blocks, aligned, inside, apart from each other."""
    start = -(-header_end // alignment) * alignment
    problems: list[str] = []
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, number, offset in rows:
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            problems.append(f"tensor {name!r} has the type {number}, which is none of ggml's; the file is damaged or newer")
            continue
        nbytes = kind.block_bytes
        for dimension in (*shape[:-1], shape[-1] // kind.block_size):
            nbytes *= dimension
        tensor = GGUFTensor(name, shape, kind, start + offset, nbytes)
        if 0 in shape or shape[-1] % kind.block_size:
            problems.append(f"tensor {name!r} has shape {shape}: rows of {kind.name} are multiples of {kind.block_size}, not 0")
        elif offset % alignment:
            problems.append(f"tensor {name!r} starts at {offset}, which is not a multiple of the alignment {alignment}")
        elif tensor.offset + nbytes > file_size:
            problems.append(f"tensor {name!r} ends at byte {tensor.offset + nbytes} of a file of {file_size}; it is cut off")
        if name in tensors:
            problems.append(f"tensor {name!r} appears twice")
        tensors[name] = tensor
    if not problems:
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        problems = [f"tensors {before.name!r} and {after.name!r} overlap"
                    for before, after in zip(ordered, ordered[1:], strict=False) if before.offset + before.nbytes > after.offset]
    if problems:
        raise refusal(path, problems)
    return list(tensors.values())
