"""Why a format, an encoding, a feature or an op runs on hardware as it does: the kernels, those passed by, and the evidence."""

from __future__ import annotations

import argparse
from typing import Any

from fitment.features import FEATURES
from fitment.formats import formats
from fitment.ops import OPS
from fitment.plugins import load
from fitment_matrix._plan import verdict_json
from fitment_matrix._site import Site
from fitment_matrix.cli._common import dump, engine_of, find, show, unknown
from fitment_matrix.cli.plan import passed_row
from fitment_matrix.evidence import Level
from fitment_matrix.evidence import load as load_evidence
from fitment_matrix.gate import reason_sentence
from fitment_matrix.generate import Cell, Survey, slowness


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``capabilities explain``."""
    parser.add_argument("hardware", help="hardware by name, or a device's id")
    parser.add_argument("thing", help="a format, format:encoding, a feature or an op")


def run(arguments: argparse.Namespace) -> int:
    """Explain; what does not run is a no."""
    registry = load()
    site = Site(find(arguments.hardware, registry), registry, engine_of(registry))
    survey = Survey(site, load_evidence())
    cell = look_up(survey, arguments.thing)
    fmt = formats().get(cell.thing)
    parts = [survey.encoding(fmt, name) for name in fmt.specs] if fmt else []
    if arguments.json:
        dump(_json(cell, parts, site))
    else:
        _print(cell, parts, site)
    return 0 if cell.status.is_served else 1


def look_up(survey: Survey, thing: str) -> Cell:
    """The cell of a format, an encoding, a feature or an op.

    Raises:
        FitmentError: ``thing`` is none of them.
    """
    fmt, _, encoding = thing.partition(":")
    if thing in formats():
        return survey.format(formats()[thing])
    if fmt in formats() and encoding in (*formats()[fmt].specs, *formats()[fmt].recognised):
        return survey.encoding(formats()[fmt], encoding)
    if thing in FEATURES:
        return survey.feature(FEATURES[thing])
    if thing in OPS:
        return survey.op(thing)
    encodings = [f"{name}:{word}" for name, known in formats().items() for word in (*known.specs, *known.recognised)]
    raise unknown("format, encoding, feature or op", thing, [*formats(), *FEATURES, *OPS, *encodings])


def _facts(cell: Cell, site: Site) -> list[tuple[str, str]]:
    """What is known of a cell, as (word, value)."""
    rows = []
    fmt, _, encoding = cell.thing.partition(":")
    if cell.kind == "encoding" and encoding in formats()[fmt].specs:
        rows.append(("family", str(formats()[fmt].specs[encoding])))
    if cell.by_activations:
        rows.append(("activations", ", ".join(f"{name} {status.value}" for name, status in cell.by_activations.items())))
    if cell.note:
        rows.append(("note", cell.note))
    if cell.kind == "feature":
        rows.append(("what it is", FEATURES[cell.thing].doc))
        engine = site.engine
        has = "has it" if engine and cell.thing in engine.features else "has it not"
        rows.append(("engine", f"{engine.name} {engine.version} {has}" if engine else "none is installed"))
    return rows


def _print(cell: Cell, parts: list[Cell], site: Site) -> None:
    evidence = f", {cell.evidence.sentence()}" if cell.kernels else ""
    print(f"{cell.hardware} × {cell.thing}: {cell.status.value}{evidence}\n")
    show(_facts(cell, site))
    if parts:
        show([(part.thing, part.status.value, " ".join(dict.fromkeys(kernel.name for kernel in part.kernels.values())))
              for part in parts])
        print(f"\n  for one of them: capabilities explain {cell.hardware} {parts[0].thing}")
        return
    show([("chosen", op, f"{kernel.name}, {kernel.speed.name.lower()}") for op, kernel in cell.kernels.items()])
    if cell.reasons:
        show([(reason.code, reason_sentence(reason, (subject,) if subject else ())) for subject, reason in cell.reasons])
    passed = _passed(cell)
    if passed:
        print("\n  passed by")
        show(passed)
    slow = slowness(site, cell.trial)
    if slow:
        print()
        show([("slow", slow.sentence())])
    if cell.kernels and cell.evidence.level < Level.EXECUTED:
        kit = f"pytest --pyargs fitment.conformance --platform {site.platform.name} --evidence FILE"
        print(f"\n  to raise: on this hardware, {kit}")


def _passed(cell: Cell) -> list[tuple[str, str, str]]:
    selections = cell.trial.selections if cell.trial else ()
    return list(dict.fromkeys(passed_row(verdict) for _, selection in selections for verdict in selection.trace
                              if verdict.kernel is not selection.chosen))


def _json(cell: Cell, parts: list[Cell], site: Site) -> dict[str, Any]:
    selections = cell.trial.selections if cell.trial else ()
    slow = slowness(site, cell.trial)
    facts = {word.replace(" ", "_"): value for word, value in _facts(cell, site) if word not in ("note", "activations")}
    return {**cell.to_json(), **facts, "parts": [part.to_json() for part in parts],
            "slow": slow.sentence() if slow else "",
            "traces": {need.label: [verdict_json(verdict) for verdict in selection.trace] for need, selection in selections}}
