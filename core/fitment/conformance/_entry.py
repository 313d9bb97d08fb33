"""The entry point for pytest, which looks for no options in a package that ``--pyargs`` names: it adds the kit's when it is named."""

from __future__ import annotations

import pytest

KIT = "fitment.conformance"


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Load the kit's plugin, if this run is one of the kit; no other run of pytest sees its options."""
    if any(arg.partition("::")[0].partition("[")[0] in (KIT, f"{KIT}.test_kernels") for arg in args):
        early_config.pluginmanager.import_plugin(f"{KIT}.plugin")
