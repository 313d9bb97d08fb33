"""Checkpoint formats: a module each; this folder's listing is the list of what is supported.

A format's module has ``FORMAT``, a :class:`~fitment.formats.base.Format`. Nothing here imports torch until a tensor is read.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from fitment.errors import FitmentError
from fitment.formats.base import Checkpoint, CheckpointError, Format, TensorInfo

__all__ = ["Checkpoint", "CheckpointError", "Format", "TensorInfo", "formats", "recognise"]


@cache
def formats() -> dict[str, Format]:
    """Every format by name."""
    names = sorted(module.name for module in iter_modules(__path__) if module.name != "base" and module.name[0] != "_")
    return {name: import_module(f"{__name__}.{name}").FORMAT for name in names}


def recognise(path: str | Path) -> Checkpoint:
    """Open the checkpoint at ``path`` (a file or a directory): headers and configuration only, no weights.

    Raises:
        FitmentError: nothing is there, no format knows it, or its format found it broken.
    """
    path = Path(path)
    if not os.path.exists(path):  # unlike path.exists(), it raises for no path
        raise CheckpointError(f"{path}: no such file or directory; give a checkpoint file, a model directory or a model name")
    for fmt in formats().values():
        if fmt.matches(path):
            return fmt.open(path)
    raise FitmentError(f"{path}: no format recognises it; served are {', '.join(formats())}. "
                       "A GGUF file starts with 'GGUF'; a Hugging Face directory has config.json and *.safetensors")
