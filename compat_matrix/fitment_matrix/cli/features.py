"""What can be turned on: each feature on the devices that are here or on hardware by name, and whether the engine has it."""

from __future__ import annotations

import argparse
from typing import Any

from fitment.features import FEATURES
from fitment.plugins import load
from fitment_matrix._site import Site
from fitment_matrix.cli._common import add_where, dump, engine_of, places, show
from fitment_matrix.evidence import load as load_evidence
from fitment_matrix.generate import Survey
from fitment_matrix.render import feature_word, first_reason

add_arguments = add_where


def run(arguments: argparse.Namespace) -> int:
    """Print a row a feature."""
    registry, book = load(), load_evidence()
    engine = engine_of(registry)
    sites = [Site(where, registry, engine) for where in places(arguments, registry)]
    surveys = [Survey(site, book) for site in sites]
    data: list[dict[str, Any]] = []
    for feature in FEATURES.values():
        cells = [survey.feature(feature).to_json() for survey in surveys]
        data.append({"feature": feature.name, "doc": feature.doc, "conflicts": dict(feature.conflicts),
                     "engine": engine is not None and feature.name in engine.features, "cells": cells})
    if arguments.json:
        dump(data)
        return 0
    rows = []
    for entry in data:
        why = next((first_reason(cell) for cell in entry["cells"] if cell["reasons"]), "")
        has = "yes" if entry["engine"] else "no"
        rows.append((entry["feature"], has, *map(feature_word, entry["cells"]), why or entry["doc"]))
    show(rows, ("feature", "engine", *(site.name for site in sites), "what it is, or why not"))
    return 0
