"""The committed snapshot is what the installed platforms give today; a cell that changes is meant to change."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fitment.plugins import load
from fitment_matrix import evidence
from fitment_matrix.generate import generate
from fitment_matrix.render import matrix_json, matrix_markdown

ROOT = Path(__file__).parents[2]
SNAPSHOT = ROOT / "compat_matrix" / "snapshot"
REGENERATE = "after a change that is meant: capabilities matrix --write compat_matrix/snapshot"


def members(group: str) -> set[str]:
    """The plugins that this repository's members provide."""
    projects = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for pattern in ("*/pyproject.toml", "*/*/pyproject.toml")
                for path in ROOT.glob(pattern)]
    return {name for project in projects for name in project.get("entry-points", {}).get(group, {})}


def committed(name: str) -> str:
    """A file of the snapshot; nothing where there is none."""
    path = SNAPSHOT / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.fixture(scope="module")
def matrix() -> dict[str, Any]:
    """The matrix of this repository's platforms and engines."""
    registry = load()
    missing = (members("fitment.platforms") | members("fitment.engines")) - {*registry.platforms, *registry.engines}
    if missing:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    registry.engines = {name: engine for name, engine in registry.engines.items() if name in members("fitment.engines")}
    return generate(registry, evidence.load(), platforms=members("fitment.platforms"))


def test_the_json_is_up_to_date(matrix: dict[str, Any]) -> None:
    def by_key(data: dict[str, Any]) -> dict[tuple[str, str, str], Any]:
        return {(cell["hardware"], cell["kind"], cell["thing"]): cell for cell in data["cells"]}

    old, new = by_key(json.loads(committed("matrix.json") or '{"cells": []}')), by_key(matrix)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    assert not changed, f"{len(changed)} cells changed, first {' '.join(changed[0])}; {REGENERATE}"
    assert committed("matrix.json") == matrix_json(matrix), REGENERATE


def test_the_markdown_is_up_to_date(matrix: dict[str, Any]) -> None:
    assert committed("matrix.md") == matrix_markdown(matrix), REGENERATE
