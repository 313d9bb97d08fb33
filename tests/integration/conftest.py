"""A real model on this machine's first device, once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitment_engine import LLM
from fitment_engine.fetch import resolve
from support import EXACT


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1, fetched when it is not in the cache."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def start(model_path: Path) -> Callable[..., LLM]:
    """Starts the model with options, each set of options once."""
    started: dict[tuple[tuple[str, Any], ...], LLM] = {}

    def start(**options: Any) -> LLM:
        key = tuple(sorted(options.items()))
        if key not in started:
            started[key] = LLM(model_path, **{"max_model_len": 4096, **options})
        return started[key]

    return start


@pytest.fixture(scope="session")
def exact(start: Callable[..., LLM]) -> LLM:
    """Everything in fp32."""
    return start(**EXACT)
