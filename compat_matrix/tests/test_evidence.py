"""Evidence is read, compared by the digest of the sources, and lapses when these change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fitment import kernels
from fitment.errors import FitmentError
from fitment.kernels import Kernel
from fitment_matrix import evidence
from fitment_matrix.evidence import Book, Evidence, Level, Record

KERNEL = Kernel("linear", "acme.linear", "evidence_acme.kernels:linear", sources=("native/b.cpp", "a.py"))


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    kernels._digest.cache_clear()


def digest() -> str:
    found = kernels.sources_digest(KERNEL)
    assert found is not None
    return found


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel's package, which must not be imported."""
    folder = tmp_path / "evidence_acme"
    (folder / "native").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n", encoding="utf-8")
    (folder / "a.py").write_text("A", encoding="utf-8")
    (folder / "native" / "b.cpp").write_text("B", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def write(folder: Path, digest: str, name: str = "acme-a1.json", **changes: Any) -> None:
    data = {"platform": "acme", "hardware": "a1", "device": "Acme One", "date": "2026-02-03", "versions": {"torch": "2.13.0"},
            "kernels": {"acme.linear": {"digest": digest, "passed": 12, "level": "executed"}}, **changes}
    (folder / name).write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.usefixtures("package")
def test_a_file_is_read_and_holds_for_its_hardware_alone(tmp_path: Path) -> None:
    write(tmp_path, digest())
    book = evidence.load(tmp_path)
    found = book.of("a1", KERNEL)
    assert found.sentence() == "executed 2026-02-03 (Acme One, torch 2.13.0; 12 cases)"
    assert found.to_json()["level"] == "executed"
    assert book.of("a2", KERNEL) == Evidence()


def test_evidence_lapses_when_a_source_changes(package: Path, tmp_path: Path) -> None:
    write(tmp_path, digest())
    (package / "native" / "b.cpp").write_text("B2", encoding="utf-8")
    kernels._digest.cache_clear()  # as in a new process
    found = evidence.load(tmp_path).of("a1", KERNEL)
    assert found.level is Level.DECLARED
    assert found.sentence() == "declared (executed 2026-02-03 has lapsed: the sources have changed since)"


def test_evidence_lapses_when_a_source_is_gone(package: Path, tmp_path: Path) -> None:
    write(tmp_path, digest())
    (package / "a.py").unlink()
    assert evidence.load(tmp_path).of("a1", KERNEL).level is Level.DECLARED


@pytest.mark.usefixtures("package")
def test_of_several_records_the_most_that_still_holds_counts() -> None:
    now = digest()
    records = [Record("a1", "acme.linear", "old", Evidence(Level.EXECUTED, "2026-03-01")),
               Record("a1", "acme.linear", now, Evidence(Level.COMPILED, "2026-02-01")),
               Record("a1", "acme.linear", now, Evidence(Level.INTERPRETED, "2026-01-01"))]
    assert Book(records).of("a1", KERNEL).level is Level.INTERPRETED


@pytest.mark.parametrize("damage", [
    {"kernels": []}, {"kernels": {"k": {}}}, {"kernels": {"k": {"digest": "", "level": "guessed", "passed": 1}}}])
def test_a_file_that_is_no_evidence_is_named(damage: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "", "broken.json", **damage)
    with pytest.raises(FitmentError, match=r"broken\.json: no evidence file"):
        evidence.load(tmp_path)


def test_no_folder_is_an_empty_book(tmp_path: Path) -> None:
    assert evidence.load(tmp_path / "none").of("a1", KERNEL).level is Level.DECLARED


def test_what_is_committed_can_be_read() -> None:
    assert evidence.committed().is_dir()
    evidence.load()
