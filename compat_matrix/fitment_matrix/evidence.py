"""Evidence: what was seen of a kernel on a piece of hardware, and whether its sources are still those that were seen.

The conformance kit writes a file a platform and device::

    {"platform": "cpu", "hardware": "zen4", "device": "AMD EPYC", "date": "2026-12-01", "versions": {"torch": "2.13.0"},
     "kernels": {"cpu.rms_norm": {"digest": "<sources_digest>", "passed": 12, "level": "executed"}}}

and the files are committed. Evidence for a kernel whose sources have another digest now (``fitment.kernels.sources_digest``) has lapsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from fitment.errors import FitmentError
from fitment.kernels import Kernel, sources_digest

_PACKAGE = Path(__file__).parent


class Level(IntEnum):
    """How much was seen, the more the greater."""

    DECLARED = 0
    COMPILED = 1
    INTERPRETED = 2
    EXECUTED = 3


@dataclass(frozen=True)
class Evidence:
    """What is known of a kernel on a profile; ``note`` says why it is less than it was."""

    level: Level = Level.DECLARED
    date: str = ""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    passed: int = 0
    note: str = ""

    def sentence(self) -> str:
        """``executed 2026-12-01 (AMD EPYC, torch 2.13.0; 12 cases)``."""
        words = self.level.name.lower()
        if self.level is Level.DECLARED:
            return words + (f" ({self.note})" if self.note else "")
        versions = ", ".join((self.device, *(f"{name} {number}" for name, number in sorted(self.versions.items()))))
        return f"{words} {self.date} ({versions}; {self.passed} cases)"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; of what is merely declared, the level and the note."""
        if self.level is Level.DECLARED:
            return {"level": "declared", "note": self.note}
        return {"level": self.level.name.lower(), "date": self.date, "device": self.device, "versions": dict(self.versions),
                "passed": self.passed, "note": self.note}


@dataclass(frozen=True)
class Record:
    """One kernel of one evidence file."""

    hardware: str
    kernel: str
    digest: str
    evidence: Evidence


class Book:
    """All records, by hardware and kernel."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._records: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            self._records.setdefault((record.hardware, record.kernel), []).append(record)

    def of(self, hardware: str, kernel: Kernel) -> Evidence:
        """The best evidence for ``kernel`` on a profile whose digest is that of its sources now."""
        records = self._records.get((hardware, kernel.name), [])
        if not records:
            return Evidence()
        best = max(records, key=lambda record: (record.evidence.level, record.evidence.date))
        now = sources_digest(kernel)
        valid = [record.evidence for record in records if record.digest == now]
        if valid:
            return max(valid, key=lambda evidence: (evidence.level, evidence.date))
        was = f"{best.evidence.level.name.lower()} {best.evidence.date}"
        return Evidence(note=f"{was} has lapsed: the sources have changed since")


def committed() -> Path:
    """The folder of the committed evidence: beside the package in the repository, inside it in a wheel."""
    inside = _PACKAGE / "snapshot" / "evidence"
    return inside if inside.is_dir() else _PACKAGE.parent / "snapshot" / "evidence"


def load(folder: Path | None = None) -> Book:
    """The evidence in ``folder`` (default: what is committed); an absent folder is an empty book.

    Raises:
        FitmentError: a file is no evidence; the message names it and what is wrong.
    """
    folder = committed() if folder is None else folder
    return Book(record for path in sorted(folder.glob("*.json")) for record in _read(path))


def _read(path: Path) -> list[Record]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [Record(str(data["hardware"]), str(name), str(entry["digest"]),
                       Evidence(Level[str(entry["level"]).upper()], str(data["date"]), str(data["device"]),
                                {str(key): str(value) for key, value in data["versions"].items()}, int(entry["passed"])))
                for name, entry in data["kernels"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FitmentError(f"{path}: no evidence file: {type(error).__name__}: {error}; write it again with "
                           "pytest --pyargs fitment.conformance --evidence FILE") from error
