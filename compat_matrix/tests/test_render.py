"""Tables align and wrap, nothing is cut off in a pipe, and colour never says what a word does not."""

from __future__ import annotations

import io
import json
import re

import pytest

from fitment_matrix import render
from fitment_matrix.evidence import Book
from fitment_matrix.generate import generate
from fitment_matrix.render import has_colour, matrix_json, matrix_markdown, matrix_text, table, terminal_width
from fitment_matrix.testing import isolate, null_platform

ROWS = [("alpha", "1", "a long last column that has many words"), ("b", "22", "short")]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_columns_align_and_lines_do_not_end_in_spaces() -> None:
    assert table(ROWS, ("what", "n", "words")) == """\
  what   n   words
  alpha  1   a long last column that has many words
  b      22  short"""


def test_the_last_column_wraps_under_itself() -> None:
    assert table(ROWS, None, 37) == """\
  alpha  1   a long last column that
             has many words
  b      22  short"""


def test_without_a_width_nothing_wraps_or_is_cut() -> None:
    long = "x" * 500 + " " + "y" * 500
    assert table([("a", long)]) == f"  a  {long}"
    assert "x" * 500 in table([("a", long)], None, 80)


def test_colour_is_for_terminals_and_adds_to_words() -> None:
    plain, bright = table([("a", "native", "x")]), table([("a", "native", "x")], None, None, True)
    assert plain != bright
    assert re.sub(r"\x1b\[\d*m", "", bright) == plain
    assert table([("a", "something", "x")], None, None, True) == table([("a", "something", "x")])


def test_a_pipe_has_no_width_and_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "91")
    assert (terminal_width(io.StringIO()), has_colour(io.StringIO())) == (None, False)
    assert (terminal_width(Terminal()), has_colour(Terminal())) == (91, True)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_turned_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not has_colour(Terminal())


def test_json_text_and_markdown_say_the_same() -> None:
    matrix = generate(null_platform(), Book())
    assert json.loads(matrix_json(matrix)) == matrix
    text, markdown = matrix_text(matrix), matrix_markdown(matrix)
    for cell in matrix["cells"]:
        name = cell["thing"].partition(":")[0]
        assert name in text
        assert name in markdown
    for reason in (reason for cell in matrix["cells"] for reason in cell["reasons"]):
        assert reason["code"] in markdown


def test_a_cell_is_a_line_of_the_json() -> None:
    matrix = generate(null_platform(), Book())
    lines = matrix_json(matrix).splitlines()
    assert sum('"kind": "' in line for line in lines) == len(matrix["cells"])


def test_every_line_of_a_wrapped_matrix_fits_eighty_columns() -> None:
    matrix = generate(null_platform(), Book())
    assert max(map(len, matrix_text(matrix, 80).splitlines())) <= 80


def test_markdown_tables_have_as_many_cells_in_each_row() -> None:
    markdown = matrix_markdown(generate(null_platform(), Book()))
    for block in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_hardware_that_is_alike_shares_a_column() -> None:
    matrix = generate(null_platform(), Book())
    assert render.alike(matrix, "feature") == [["null"], ["null-2"]]
    twin = [{**cell, "hardware": "twin"} for cell in matrix["cells"] if cell["hardware"] == "null"]
    both = {**matrix, "hardware": {**matrix["hardware"], "twin": matrix["hardware"]["null"]}, "cells": [*matrix["cells"], *twin]}
    assert render.alike(both, "feature") == [["null", "twin"], ["null-2"]]
