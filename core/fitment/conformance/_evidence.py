"""Evidence: which kernels passed everything, on what, with which versions of what."""

from __future__ import annotations

import json
import platform as host
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fitment.conformance._session import Session
from fitment.kernels import Kernel, sources_digest


@dataclass
class Tally:
    """How many tests of each kernel, by name, there are, have ended, and how they ended."""

    collected: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    executed: set[str] = field(default_factory=set)

    def lacks(self, kernel: Kernel) -> str:
        """Why there is no evidence for a kernel; "" when there is."""
        name = kernel.name
        if self.failed[name]:
            return f"{self.failed[name]} failed"
        if name not in self.executed:
            return "it was not executed"
        if self.ended[name] < self.collected[name]:
            return f"{self.collected[name] - self.ended[name]} of {self.collected[name]} tests were not run"
        return "" if sources_digest(kernel) else "it names no sources that are there, so nothing would date it"


def write(path: Path, session: Session, tally: Tally) -> None:
    """Write the evidence file."""
    assert session.device is not None, "nothing is executed without a device"
    kernels = {kernel.name: {"op": kernel.op, "digest": sources_digest(kernel), "passed": tally.passed[kernel.name], "failed": 0,
                             "level": "executed"}
               for kernel in session.kernels if not tally.lacks(kernel)}
    evidence = {"platform": session.platform.name, "hardware": session.device.hardware, "device": session.device.title,
                "date": datetime.now(UTC).date().isoformat(), "versions": _versions(session), "kernels": kernels}
    path.write_text(json.dumps(evidence, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _versions(session: Session) -> dict[str, Any]:
    own = {session.platform.distribution: session.platform.version} if session.platform.version else {}
    return {"fitment": version("fitment"), "torch": version("torch"), "python": host.python_version(), **own}
