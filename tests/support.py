"""What the tests that cross distributions share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"
TINY = DATA / "tiny-llama"
EXACT: dict[str, Any] = {"dtype": "fp32", "activations": "fp32", "kv_dtype": "fp32"}
"""Options under which a run is comparable, token by token, with another implementation's in fp32."""


def golden(name: str) -> Any:
    """One of the golden files."""
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))
