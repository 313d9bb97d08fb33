"""Reading files that may be hostile: memory maps, JSON, and error messages that stay short."""

from __future__ import annotations

import json
import mmap
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from fitment.formats.base import CheckpointError, TensorInfo

MAX_SHOWN = 20
"""Problems that one error message spells out; the rest are counted."""

_GENERIC_NORESERVE = 0x4000 if sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64") else 0
# Python's mmap has the flag from 3.13 on; without it the kernel counts a private map against memory that is never used:
# https://docs.kernel.org/mm/overcommit-accounting.html
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", _GENERIC_NORESERVE)


def shown(value: object, limit: int = 60) -> str:
    """``repr(value)``, cut to ``limit`` characters."""
    if isinstance(value, (str, list)):
        value = value[:limit + 1]  # each item takes at least a character
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of more digits than Python prints, or lists in lists in lists
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= limit else f"{text[:limit]}…"


def refusal(subject: object, problems: Sequence[str]) -> CheckpointError:
    """One error for all ``problems`` of ``subject``; long lists are cut and counted."""
    assert problems, "a refusal has a reason"
    if len(problems) == 1:
        return CheckpointError(f"{subject}: {problems[0]}")
    lines = [*problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        lines.append(f"… and {len(problems) - MAX_SHOWN} more")
    return CheckpointError(f"{subject}: {len(problems)} problems" + "".join(f"\n  {line}" for line in lines))


def _open(path: Path) -> tuple[int, int]:
    """A descriptor and the size of a regular file; never waits for a pipe."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file; give a checkpoint file or a model directory")
        return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)), status.st_size
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be opened: {error}; check the path and its permissions") from error


def map_file(path: Path) -> mmap.mmap:
    """Map a file privately (writes stay in memory), so that tensors can lie on it without a copy.

    The map holds the file open. A file that shrinks afterwards makes its pages fault, so compare ``map.size()`` (the file's size
    now) with what is about to be read.

    Raises:
        CheckpointError: there is no such file, it is empty, or it cannot be mapped.
    """
    descriptor, size = _open(path)
    try:
        if not size:
            raise CheckpointError(f"{path}: the file is empty; fetch it again")
        if sys.platform == "win32":
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be mapped into memory: {error}") from error
    finally:
        os.close(descriptor)


class Region(Protocol):
    """Bytes of a file."""

    @property
    def offset(self) -> int:
        """Where they begin, from the file's start."""

    @property
    def nbytes(self) -> int:
        """How many there are."""


class MappedFile:
    """A file whose tensors lie on a memory map.

    Attributes:
        path: The file.
        buffer: Its memory map, private and writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = map_file(path)

    def view(self, tensor: Region) -> memoryview:
        """The bytes of a tensor, on the map.

        Raises:
            CheckpointError: the file has been cut off since it was opened.
        """
        end = tensor.offset + tensor.nbytes
        check_size(self.path, self.buffer, end)
        return memoryview(self.buffer)[tensor.offset:end]

    def release(self, tensor: Region) -> None:
        """Give back the pages of a tensor (see ``Checkpoint.release``)."""
        forget(self.buffer, tensor.offset, tensor.offset + tensor.nbytes)


def forget(buffer: mmap.mmap, start: int, end: int) -> None:
    """Give back the pages that lie wholly in the bytes ``[start, end)`` of a map, where the system can."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mmap, "MADV_DONTNEED") and first < last:
        buffer.madvise(mmap.MADV_DONTNEED, first, last - first)


def check_size(path: Path, buffer: mmap.mmap, end: int) -> None:
    """Raise CheckpointError when the file has become shorter than ``end`` since it was mapped."""
    size = buffer.size()
    if size < end:
        raise CheckpointError(f"{path}: the file shrank to {size} bytes while it was open, {end} are needed; fetch it again")


def find(path: Path, tensors: Mapping[str, TensorInfo], name: str, served: Iterable[str]) -> TensorInfo:
    """The tensor ``name``, which is there and has a spec.

    Raises:
        CheckpointError: it is not there, or of an encoding that is none of ``served``.
    """
    info = tensors.get(name)
    if info is None:
        near = get_close_matches(name, tensors, n=3)
        raise CheckpointError(f"{path}: no tensor {shown(name)}" + (f"; near it are {', '.join(near)}" if near else ""))
    if info.spec is None:
        raise CheckpointError(f"{path}: {name} is {info.encoding} of shape {info.shape}, which is not read; read are "
                              f"{', '.join(served)}; convert the checkpoint to one of these")
    return info


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {shown(twice)} appears twice")
    return mapping


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object in UTF-8; duplicate names and NaN are refused.

    Raises:
        CheckpointError: ``text`` is no JSON object, or one nested too deeply; the message begins with ``where``.
    """
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise CheckpointError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON: {shown(str(error), 200)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a JSON {type(value).__name__}, wanted an object")
    return value


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file of at most ``limit`` bytes.

    Raises:
        CheckpointError: there is no such file, it is too long, or it holds no JSON object.
    """
    descriptor, size = _open(path)
    with os.fdopen(descriptor, "rb") as file:
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes of JSON, at most {limit} are read")
        try:
            return parse_json(file.read(limit), str(path))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
