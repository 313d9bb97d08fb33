"""What the commands share: finding hardware, engines and models, and printing."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fitment.conditions import Reason
from fitment.errors import FitmentError
from fitment.formats import Checkpoint, recognise
from fitment.hardware import Device, Hardware
from fitment.hookspecs import EngineInfo
from fitment.plugins import Registry
from fitment_matrix.render import has_colour, json_text, table, terminal_width

RESOLVER_GROUP = "fitment.resolvers"
"""Entry points: functions from a model's name to its path, which raise FitmentError for names that are not theirs."""


def add_where(parser: argparse.ArgumentParser) -> None:
    """Where to look: one of a profile and a device."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--hardware", metavar="NAME", help="hardware by name, here or not (capabilities matrix lists it)")
    group.add_argument("--device", metavar="ID", help="a device that is here, such as cpu:0")


def show(rows: Sequence[Sequence[str]], header: Sequence[str] | None = None) -> None:
    """Print a table, wrapped and coloured on a terminal."""
    if rows:
        print(table(rows, header, terminal_width(), has_colour()))


def dump(value: Any) -> None:
    """Print JSON."""
    print(json_text(value))


_LISTED = 30
"""Names that a message lists."""


def unknown(kind: str, name: str, known: Iterable[str]) -> FitmentError:
    """The error for a name that is none of ``known``."""
    known = list(known)
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    listed = ", ".join(known[:_LISTED]) + (f" … and {len(known) - _LISTED} more" if len(known) > _LISTED else "")
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {listed or 'none'}"
    return FitmentError(f"{kind} {name!r} is not known; {hint}")


def find(name: str, registry: Registry) -> Device | Hardware:
    """The profile or the device of that name."""
    places: dict[str, Device | Hardware] = {**registry.hardware, **{device.id: device for device in registry.devices}}
    if name not in places:
        raise unknown("hardware", name, places)
    return places[name]


def places(arguments: argparse.Namespace, registry: Registry) -> Sequence[Device | Hardware]:
    """Where the command line says: one profile, one device, or every device that is here.

    Raises:
        FitmentError: there is no such hardware, or no device at all.
    """
    if arguments.hardware is not None:
        if arguments.hardware not in registry.hardware:
            raise unknown("hardware", arguments.hardware, registry.hardware)
        return [registry.hardware[arguments.hardware]]
    devices = registry.devices
    if arguments.device is not None:
        devices = tuple(device for device in devices if device.id == arguments.device)
        if not devices:
            raise unknown("device", arguments.device, [device.id for device in registry.devices])
    if not devices:
        raise FitmentError("no device is here; `capabilities` says why; --hardware NAME asks about hardware by name")
    return devices


def engine_of(registry: Registry) -> EngineInfo | None:
    """The engine that requests are checked for: the first that is installed."""
    return next(iter(registry.engines.values()), None)


def open_model(name: str) -> Checkpoint:
    """Open a model's checkpoint: a path, or a name that an installed resolver knows.

    Raises:
        FitmentError: it is no path and no resolver has it, or the checkpoint is broken.
    """
    if Path(name).exists():
        return recognise(name)
    refusals = []
    for point in entry_points(group=RESOLVER_GROUP):
        try:
            return recognise(point.load()(name))
        except FitmentError as error:
            refusals.append(str(error))
        except ImportError as error:
            refusals.append(f"{point.value}: {error}")
    if refusals:
        raise FitmentError("\n".join(refusals))
    return recognise(name)


def remedy(reason: Reason) -> str:
    """What to do about a reason, as the end of a line."""
    return f"→ {reason.remedy}" if reason.remedy else ""
