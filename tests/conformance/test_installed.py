"""The conformance kit over every platform that is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fitment.plugins import load


@pytest.mark.parametrize("platform", load().platforms)
def test_an_installed_platform_conforms(platform: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "fitment.conformance", "--platform", platform]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
