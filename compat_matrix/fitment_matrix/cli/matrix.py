"""Every format, encoding and feature on all hardware that the installed plugins know, with the evidence."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitment.errors import FitmentError
from fitment.features import FEATURES
from fitment.formats import formats
from fitment.plugins import load
from fitment_matrix.cli._common import dump, unknown
from fitment_matrix.evidence import load as load_evidence
from fitment_matrix.generate import Status, generate
from fitment_matrix.render import has_colour, matrix_json, matrix_markdown, matrix_text, terminal_width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``capabilities matrix``."""
    for name, words in (("platform", "a platform"), ("hardware", "hardware by name"), ("format", "a format, or format:encoding"),
                        ("feature", "a feature"), ("status", "a status: " + ", ".join(Status))):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="NAME", help=f"only {words}; can be repeated")
    parser.add_argument("--markdown", action="store_true", help="as Markdown")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write matrix.json and matrix.md into DIR")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the matrix; one without a cell is a no."""
    registry = load()
    _check("platform", arguments.platform, [*registry.platforms])
    _check("hardware", arguments.hardware, [*registry.hardware])
    _check("format", arguments.format, [thing for fmt in formats().values() for thing in (fmt.name, *_encodings(fmt.name))])
    _check("feature", arguments.feature, [*FEATURES])
    _check("status", arguments.status, [*Status])
    matrix = filtered(generate(registry, load_evidence()), arguments)
    if arguments.write is not None:
        write(matrix, arguments.write)
    elif arguments.json:
        dump(matrix)
    elif arguments.markdown:
        print(matrix_markdown(matrix), end="")
    else:
        print(matrix_text(matrix, terminal_width(), has_colour()))
    return 0 if matrix["cells"] else 1


def _encodings(name: str) -> list[str]:
    return [f"{name}:{encoding}" for encoding in formats()[name].specs]


def _check(kind: str, names: list[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)


def filtered(matrix: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The matrix with the cells that every given filter lets through, and the hardware, formats and features of these cells."""
    def is_kept(cell: Mapping[str, Any]) -> bool:
        thing, platform = cell["thing"], matrix["hardware"][cell["hardware"]]["platform"]
        asked = (*arguments.format, *arguments.feature)
        return ((not arguments.platform or platform in arguments.platform)
                and (not arguments.hardware or cell["hardware"] in arguments.hardware)
                and (not asked or thing in asked or thing.partition(":")[0] in arguments.format)
                and (not arguments.status or cell["status"] in arguments.status))

    cells = [cell for cell in matrix["cells"] if is_kept(cell)]
    things = {cell["thing"].partition(":")[0] for cell in cells}
    hardware = {cell["hardware"] for cell in cells}
    return {**matrix, "cells": cells,
            "hardware": {name: value for name, value in matrix["hardware"].items() if name in hardware},
            "formats": {name: value for name, value in matrix["formats"].items() if name in things},
            "features": {name: value for name, value in matrix["features"].items() if name in things}}


def write(matrix: Mapping[str, Any], folder: Path) -> None:
    """Write both files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "matrix.json").write_text(matrix_json(matrix), encoding="utf-8")
        (folder / "matrix.md").write_text(matrix_markdown(matrix), encoding="utf-8")
    except OSError as error:
        raise FitmentError(f"--write {folder}: {error}") from error
