"""The matrix for people: tables for a terminal and for Markdown, and JSON, all from the same dict.

Tables align, and nothing is cut off in a pipe: only on a terminal does the last column wrap to its width. Colour appears on a
terminal alone, and never carries a meaning that a word does not.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

Matrix = Mapping[str, Any]
"""What ``generate`` gives."""

COLOURS = {"native": "32", "portable": "36", "reference": "33", "unsupported": "31", "unknown": "35", "yes": "32", "no": "31",
           "broken": "31"}
"""SGR codes of the words that are coloured."""

LEGEND = {
    "native": "the hardware's own path",
    "portable": "computed on the packed weights, without a unit made for it",
    "reference": "torch computes it: right, and slow",
    "unsupported": "it does not run; the reasons say why",
    "unknown": "a fact is missing that would decide it",
    "any": "a feature that asks nothing of the hardware, only of the engine",
}
MARKS = {"native": "N", "portable": "P", "reference": "R", "unsupported": "–", "unknown": "?", "any": "·"}


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that output goes to; None in a pipe or a file."""
    stream = stream or sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def has_colour(stream: TextIO | None = None) -> bool:
    """Whether to colour: on a terminal, unless NO_COLOR (https://no-color.org) is set."""
    return (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(word: str, is_on: bool) -> str:
    """``word`` in the colour of its status, padding included."""
    code = COLOURS.get(word.strip())
    return f"\x1b[{code}m{word}\x1b[0m" if is_on and code else word


def table(rows: Sequence[Sequence[str]], header: Sequence[str] | None = None, width: int | None = None,
          has_colours: bool = False, indent: str = "  ") -> str:
    """Rows in aligned columns; with a ``width`` the last column wraps into it."""
    every = [*([header] if header else []), *rows]
    if not every:
        return ""
    sizes = [max(len(row[i]) for row in every) for i in range(len(every[0]) - 1)]
    start = len(indent) + sum(size + 2 for size in sizes)
    lines = []
    for row in every:
        first = "".join(coloured(f"{cell:<{size}}", has_colours) + "  " for cell, size in zip(row[:-1], sizes, strict=True))
        last = _wrapped(row[-1], max(20, width - start)) if width else [row[-1]]
        lines.append((indent + first + coloured(last[0], has_colours)).rstrip())
        lines += [" " * start + line for line in last[1:]]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def json_text(value: Any) -> str:
    """Indented JSON."""
    return json.dumps(value, indent=1, ensure_ascii=False)


def matrix_json(matrix: Matrix) -> str:
    """The matrix as JSON with a cell a line, so that a change of one is a changed line."""
    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    lines = [f" {line(key)}: {line(value)}" for key, value in matrix.items() if key not in ("hardware", "cells")]
    hardware = ",\n".join(f"  {line(name)}: {line(value)}" for name, value in matrix["hardware"].items())
    cells = ",\n".join(f"  {line(cell)}" for cell in matrix["cells"])
    return "{\n" + ",\n".join([*lines, f' "hardware": {{\n{hardware}\n }}', f' "cells": [\n{cells}\n ]']) + "\n}\n"


def by_thing(matrix: Matrix, kind: str) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Cells of a kind: thing, then hardware."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for cell in matrix["cells"]:
        if cell["kind"] == kind:
            found.setdefault(cell["thing"], {})[cell["hardware"]] = cell
    return found


def alike(matrix: Matrix, kind: str) -> list[list[str]]:
    """Hardware whose cells of a kind have the same statuses, in groups, in the matrix's order."""
    things = by_thing(matrix, kind)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in matrix["hardware"]:
        groups.setdefault(tuple(cells[name]["status"] for cells in things.values() if name in cells), []).append(name)
    return list(groups.values())


def first_reason(cell: Mapping[str, Any]) -> str:
    """A cell's first reason with its code, and how many more there are."""
    reasons = cell["reasons"]
    if not reasons:
        return ""
    reason = reasons[0]
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"{reason['code']} {reason['against']} needs {reason['wanted']}; {reason['key']} is {reason['found']}{more}"


def detail_rows(matrix: Matrix) -> list[tuple[str, ...]]:
    """A row for each cell: hardware, thing, status, evidence, and the kernels, the note or the reason."""
    rows: list[tuple[str, ...]] = []
    for cell in matrix["cells"]:
        words = " ".join(dict.fromkeys(cell["kernels"].values()))
        rows.append((cell["hardware"], cell["thing"], cell["status"], cell["evidence"]["level"] if cell["kernels"] else "",
                     "; ".join(filter(None, (cell["note"], words, first_reason(cell))))))
    return rows


def matrix_text(matrix: Matrix, width: int | None = None, has_colours: bool = False) -> str:
    """Tables for a terminal: every cell of one piece of hardware, or formats and features over all of it."""
    if not matrix["cells"]:
        return "  no cell is left by these filters"
    if len(matrix["hardware"]) == 1 or not (by_thing(matrix, "format") or by_thing(matrix, "feature")):
        rows = detail_rows(matrix)
        header = ("hardware", "what", "status", "evidence", "kernels, notes, reasons")
        return table(rows, header, width, has_colours)
    parts = []
    formats = by_thing(matrix, "format")
    if formats:
        rows = [(name, hw["platform"], *(_status_and_evidence(cells.get(name)) for cells in formats.values()))
                for name, hw in matrix["hardware"].items()]
        parts += [table(rows, ("hardware", "platform", *formats), None, has_colours), table(_notes(matrix), None, width)]
    features = by_thing(matrix, "feature")
    if features:
        parts.append(_feature_table(matrix, features, width, has_colours))
    return "\n\n".join(filter(None, parts))


def _status_and_evidence(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    return f"{cell['status']}, {cell['evidence']['level']}" if _is_served(cell) else str(cell["status"])


def _is_served(cell: Mapping[str, Any]) -> bool:
    return cell["status"] not in ("unsupported", "unknown")


def _notes(matrix: Matrix) -> list[tuple[str, str]]:
    """What the notes of partial formats say, and of which hardware."""
    found: dict[tuple[str, str], list[str]] = {}
    for fmt, cells in by_thing(matrix, "format").items():
        for name, cell in cells.items():
            if cell["note"]:
                found.setdefault((fmt, cell["note"]), []).append(name)
    return [(fmt, f"{note}{'' if len(names) == len(matrix['hardware']) else ' on ' + ', '.join(names)}")
            for (fmt, note), names in found.items()]


def _letters(number: int) -> list[str]:
    return [chr(ord("A") + i) if number <= 26 else str(i + 1) for i in range(number)]


def _feature_table(matrix: Matrix, features: Mapping[str, Mapping[str, Any]], width: int | None, has_colours: bool) -> str:
    groups = alike(matrix, "feature")
    letters = _letters(len(groups))
    rows = [(name, _engines(matrix, name), *(feature_word(cells[group[0]]) for group in groups))
            for name, cells in features.items()]
    names = table([(letter, ", ".join(group)) for letter, group in zip(letters, groups, strict=True)], None, width)
    return f"{table(rows, ('feature', 'engines', *letters), None, has_colours)}\n\n{names}"


def feature_word(cell: Mapping[str, Any]) -> str:
    """A feature's status in a table: ``any`` where it asks nothing of the hardware."""
    return "any" if _is_served(cell) and not cell["kernels"] else str(cell["status"])


def _engines(matrix: Matrix, feature: str) -> str:
    return ", ".join(matrix["features"][feature]["engines"]) or "none"


def matrix_markdown(matrix: Matrix) -> str:
    """The matrix as a Markdown document."""
    lines = ["# What runs where", "", "Generated by `capabilities matrix --write`; do not edit.",
             "A cell is the worst of the kernels that it needs on that hardware, with the weakest evidence for them.", ""]
    lines += [f"- **{word}** ({MARKS[word]}): {meaning}" for word, meaning in LEGEND.items()]
    lines += ["", "## Formats", "", *_markdown(("hardware", "platform", *matrix["formats"]), (
        (name, hw["platform"], *(_markdown_cell(cells.get(name)) for cells in by_thing(matrix, "format").values()))
        for name, hw in matrix["hardware"].items()))]
    for fmt, entry in matrix["formats"].items():
        lines += ["", f"### {fmt}: {entry['title']}", "", *_encodings(matrix, fmt)]
        if entry["recognised"]:
            lines += ["", f"Recognised and not read: {', '.join(entry['recognised'])}."]
    return "\n".join([*lines, "", "## Features", "", *_features(matrix), "", "## Why not", "", *_why_not(matrix)]) + "\n"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(header), "|" + " --- |" * len(header), *map(line, rows)]


def _markdown_cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    return ", ".join(filter(None, (cell["status"], cell["note"], cell["evidence"]["level"] if _is_served(cell) else "")))


def _encodings(matrix: Matrix, fmt: str) -> list[str]:
    prefix = f"{fmt}:"
    cells = {thing.removeprefix(prefix): found for thing, found in by_thing(matrix, "encoding").items()
             if thing.startswith(prefix)}

    def shown(cell: Mapping[str, Any]) -> str:
        activations = ", ".join(name for name in cell["by_activations"])
        return f"{cell['status']} ({activations})" if activations else str(cell["status"])

    rows = [(name, *(shown(found[name]) for found in cells.values())) for name in matrix["hardware"]]
    return [*_markdown(("hardware", *cells), rows), "", "In brackets: the element types of activations under which it runs."]


def _features(matrix: Matrix) -> list[str]:
    features, groups = by_thing(matrix, "feature"), alike(matrix, "feature")
    letters = _letters(len(groups))
    legend = [f"- {letter}: {', '.join(group)}" for letter, group in zip(letters, groups, strict=True)]
    rows = [(name, matrix["features"][name]["doc"], _engines(matrix, name), *(MARKS[feature_word(cells[g[0]])] for g in groups))
            for name, cells in features.items()]
    return [*legend, "", *_markdown(("feature", "what it is", "engines that have it", *letters), rows)]


def _why_not(matrix: Matrix) -> list[str]:
    """Each reason once, with what it stands against and where."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in matrix["cells"]:
        for reason in cell["reasons"]:
            sentence = f"`{reason['code']}` needs {reason['wanted']}; {reason['key']} is {reason['found']}"
            found.setdefault((cell["thing"], sentence), []).append(cell["hardware"])
    def where(names: list[str]) -> str:
        distinct = dict.fromkeys(names)
        return "everywhere" if len(distinct) == len(matrix["hardware"]) else ", ".join(distinct)

    return _markdown(("what", "where", "why"), [(thing, where(names), why) for (thing, why), names in found.items()])
