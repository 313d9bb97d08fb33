"""What this machine can run: its devices, formats and features, what is missing and how to get it."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fitment import __version__
from fitment.features import FEATURES
from fitment.hardware import Device
from fitment.plugins import Platform, Registry, load
from fitment_matrix._memory import gib
from fitment_matrix._site import Site
from fitment_matrix.cli._common import dump, engine_of, remedy, show
from fitment_matrix.evidence import Book
from fitment_matrix.evidence import load as load_evidence
from fitment_matrix.generate import Cell, Status, Survey, slowness

MOST = 4
"""Features that the overview says are not here; the rest are counted."""


def run(arguments: argparse.Namespace) -> int:
    """Print the overview; no device is a no."""
    registry, book = load(), load_evidence()
    data = overview(registry, book)
    if arguments.json:
        dump(data)
    else:
        _print(data, registry)
    return 0 if data["devices"] else 1


def overview(registry: Registry, book: Book) -> dict[str, Any]:
    """The overview as JSON holds it."""
    return {
        "environment": environment(),
        "devices": [_device(device, registry, book) for device in registry.devices],
        "missing": [{"platform": owner.name, **reason.to_json()} for owner in registry.platforms.values()
                    for reason in owner.listing.reasons],
        "platforms": {owner.name: [device.id for device in owner.listing.devices] for owner in registry.platforms.values()},
        "engines": {name: engine.version for name, engine in registry.engines.items()},
        "broken": [vars(broken) for broken in registry.broken],
    }


def environment() -> dict[str, str]:
    """Versions that decide what runs, without importing any of it."""
    found = {"fitment": __version__, platform.system(): ".".join(platform.release().split(".")[:2])}
    with suppress(ValueError, OSError, AttributeError):  # another C library, or another operating system
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        found |= {name: number} if number else {}
    found["Python"] = platform.python_version()
    with suppress(PackageNotFoundError):
        found["torch"] = version("torch")
    return found


def _device(device: Device, registry: Registry, book: Book) -> dict[str, Any]:
    site = Site(device, registry, engine_of(registry))
    cells = list(Survey(site, book).cells())
    formats = [cell for cell in cells if cell.kind == "format"]
    features = [cell for cell in cells if cell.kind == "feature"]
    has = set(site.engine.features) if site.engine else set(FEATURES)
    served = [cell for cell in (*formats, *features) if cell.status.is_served and cell.kernels]
    return {
        "id": device.id, "hardware": device.hardware, "title": device.title, "facts": device.facts.to_json(),
        "formats": {cell.thing: {"status": cell.status.value, "note": cell.note} for cell in formats},
        "features": {cell.thing: {"status": cell.status.value, "engine": cell.thing in has, "why": _why(cell, cell.thing in has)}
                     for cell in features},
        "worst_evidence": min(served, key=lambda cell: cell.evidence.level).evidence.level.name.lower() if served else "",
        "slow": _slow(site, formats),
    }


def _slow(site: Site, formats: Sequence[Cell]) -> dict[str, Any] | None:
    """Why even the best format is slow, with the reason's code and remedy; None where it is not."""
    best = min(formats, key=lambda cell: list(Status).index(cell.status))
    slow = slowness(site, best.trial)
    return {"sentence": slow.sentence(), "reason": slow.reason.to_json() if slow.reason else None} if slow else None


def _why(cell: Cell, has_engine: bool) -> str:
    """Why a feature is not here: the hardware's first reason, else the engine."""
    if cell.reasons:
        return f"needs {cell.reasons[0][1].wanted}"
    return "" if has_engine else "the engine has none yet"


def _print(data: Mapping[str, Any], registry: Registry) -> None:
    first, *rest = data["environment"].items()
    print(f"Fitment {first[1]} · {', '.join(f'{name} {number}' for name, number in rest)}\n")
    devices: Sequence[Mapping[str, Any]] = data["devices"]
    show([_row(device) for device in devices], ("device", "hardware", "arch", "memory", "formats", "features", "worst evidence"))
    told = [device["slow"]["reason"] for device in devices if device["slow"]]
    missing = [row for owner in registry.platforms.values() for row in _missing(owner, told)]
    missing += [(broken.name, f"plugin broken: {broken.problem.splitlines()[0]} → capabilities plugins {broken.name}")
                for broken in registry.broken]
    if missing:
        print()
        show(missing)
    for device in devices:
        print()
        show(_lists(device))
        if device["slow"]:
            print()
            show([(f"{device['id']} is slow", device["slow"]["sentence"])])


def _row(device: Mapping[str, Any]) -> tuple[str, ...]:
    formats, features, facts = device["formats"].values(), device["features"].values(), device["facts"]
    served = sum(Status(cell["status"]).is_served for cell in formats)
    have = sum(Status(cell["status"]).is_served and cell["engine"] for cell in features)
    memory = gib(facts["memory_bytes"]) if "memory_bytes" in facts else "–"
    return (device["id"], device["hardware"] or "–", facts.get("arch", "–"), memory,
            f"{served} of {len(formats)}", f"{have} of {len(features)}", device["worst_evidence"] or "–")


def _missing(owner: Platform, told: Sequence[Any]) -> list[tuple[str, str]]:
    """A row for each reason why a platform has fewer devices or kernels than it could, but for those told of a device."""
    what = "" if owner.listing.devices else "no device: "
    return [(owner.name, f"{what}{reason.wanted}: {reason.found} {remedy(reason)}".rstrip()) for reason in owner.listing.reasons
            if reason.to_json() not in told]


def _lists(device: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is native, portable, reference and not here."""
    rows = []
    for status in (Status.NATIVE, Status.PORTABLE, Status.REFERENCE):
        names = [f"{name} ({cell['note']})" if cell["note"] else name for name, cell in device["formats"].items()
                 if cell["status"] == status.value]
        names += [name for name, cell in device["features"].items() if cell["status"] == status.value and cell["engine"]]
        if names:
            rows.append((f"{status.value} on {device['id']}", ", ".join(names)))
    absent = [f"{name} ({'no kernel' if not cell['why'] else cell['why']})" for name, cell in device["features"].items()
              if not (Status(cell["status"]).is_served and cell["engine"])]
    if absent:
        more = f" … {len(absent) - MOST} more: capabilities features" if len(absent) > MOST else ""
        rows.append(("not here", ", ".join(absent[:MOST]) + more))
    return rows
