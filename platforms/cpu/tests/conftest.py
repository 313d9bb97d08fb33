"""What tests of native kernels share: each instruction set in turn, and everything put back."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from fitment_cpu import _build

LEVELS: list[str] = import_module("fitment_cpu._native").levels() if _build.is_built() else []


@pytest.fixture
def native_settings() -> Iterator[None]:
    """Puts the level and the threads back; torch has one thread meanwhile, as others would stand in the way of the kernels'."""
    native = import_module("fitment_cpu._native")
    level, threads, torch_threads = native.level(), native.num_threads(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    native.set_level(level)
    native.set_num_threads(threads)
    torch.set_num_threads(torch_threads)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, native_settings: None) -> str:
    """Each instruction set in turn."""
    name: str = request.param
    assert import_module("fitment_cpu._native").set_level(name)
    return name
