"""GGUF models in several files: ``NAME-00001-of-00003.gguf`` and so on, the first of which has the metadata.

Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/gguf-split/README.md and ``llama_split_path`` in src/llama.cpp.
"""

from __future__ import annotations

import re
from pathlib import Path

from fitment.formats._files import refusal, shown
from fitment.formats._gguf_reader import GGUFFile
from fitment.formats.base import CheckpointError

_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf", re.DOTALL)


def open_parts(path: Path) -> list[GGUFFile]:
    """The file at ``path`` with the other parts of its model, in their order; the first has the model's metadata.

    Raises:
        CheckpointError: a part is missing or damaged, or the parts do not belong together.
    """
    file = GGUFFile(path)
    count = file.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count < 100_000:
        raise CheckpointError(f"{path}: split.count is {shown(count)}, wanted a number of files below 100000")
    if count <= 1:
        return [file]
    match = _PART.fullmatch(path.name)
    if not match or int(match[2]) != count:
        raise CheckpointError(f"{path}: split.count is {count}, so the name must end in -00001-of-{count:05}.gguf, with the other parts "
                              "beside it")
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(1, count + 1)]
    missing = [f"the part {part.name} is missing; fetch it" for part in paths if not part.exists()]
    if missing:
        raise refusal(path, missing)
    files = [file if part == path else GGUFFile(part) for part in paths]
    _check(path, files)
    return files


def _check(path: Path, files: list[GGUFFile]) -> None:
    wanted = [(file, key, value) for number, file in enumerate(files)
              for key, value in (("split.no", number), ("split.count", len(files)))]
    if "split.tensors.count" in files[0].metadata:
        wanted.append((files[0], "split.tensors.count", sum(len(file.tensors) for file in files)))
    problems = [f"{file.path.name}: {key} is {shown(file.metadata.get(key))}, wanted {value} for these parts"
                for file, key, value in wanted if file.metadata.get(key) != value]
    if problems:
        raise refusal(path, problems)
