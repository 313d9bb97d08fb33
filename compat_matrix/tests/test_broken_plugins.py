"""A plugin that is broken is a row that says what is wrong, and the others work as if it were not there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fitment.conditions import equals
from fitment.hookspecs import hookimpl
from fitment_matrix.cli import main
from fitment_matrix.testing import all_kernels, isolate, plugin, write_model


@pytest.fixture(autouse=True)
def four_are_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One raises on import, one was written for another API, one returns the wrong type, one uses a fact that nobody declared."""
    (tmp_path / "broken_on_import.py").write_text("raise RuntimeError('no licence server')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_on_import", raising=False)

    future = plugin("future", all_kernels("future"))
    future.FITMENT_API = ">=2"  # type: ignore[attr-defined]

    wrong = plugin("wrong", all_kernels("wrong"))

    @hookimpl
    def fitment_kernels() -> list[str]:
        return ["wrong.linear"]

    wrong.fitment_kernels = fitment_kernels  # type: ignore[attr-defined]

    first, *others = all_kernels("undeclared")
    undeclared = plugin("undeclared", [replace(first, condition=equals("tile_rows", 16)), *others])

    isolate(monkeypatch, crash="broken_on_import", future=future, wrong=wrong, undeclared=undeclared, null="fitment.null.plugin")


BROKEN = {
    "crash": ("import", "RuntimeError: no licence server"),
    "future": ("api", "built for API >=2, this is 1.0; install a version of the plugin that fits"),
    "wrong": ("fitment_kernels", "fitment_kernels returned 'wrong.linear' (str), wanted Kernel"),
    "undeclared": ("declarations", "platform undeclared: 1 problem"),
}


def test_each_is_a_row_that_says_where_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[1].split()[:3] == ["null", "platform", "ok"]
    rows = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert set(rows) == set(BROKEN)
    for name, (stage, problem) in BROKEN.items():
        assert rows[name].split()[1:3] == ["plugin", "broken"]
        assert rows[name].endswith(f"{stage}: {problem}")


@pytest.mark.parametrize("name", BROKEN)
def test_one_is_told_about_in_full(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", name]) == 1
    text = capsys.readouterr().out
    assert all(words in text for words in BROKEN[name])
    assert main(["plugins", name, "--json"]) == 1
    [entry] = json.loads(capsys.readouterr().out)
    assert (entry["state"], entry["stage"]) == ("broken", BROKEN[name][0])
    assert BROKEN[name][1] in entry["problem"]


def test_the_undeclared_fact_is_named_with_its_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plugins", "undeclared"])
    assert "its condition looks at fact 'tile_rows', which nobody declared; declare a FactKey for it" in capsys.readouterr().out


def test_the_overview_shows_them_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for name, (_stage, problem) in BROKEN.items():
        row = next(line for line in text.splitlines() if line.split()[:1] == [name])
        assert f"plugin broken: {problem}" in row
        assert row.endswith(f"→ capabilities plugins {name}")
    assert "null:0" in text


def test_the_others_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", str(write_model(tmp_path / "tiny"))]) == 0
    assert capsys.readouterr().out.startswith("Yes. null:0")
    assert main(["matrix", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["hardware"]) == {"null", "null-2"}
