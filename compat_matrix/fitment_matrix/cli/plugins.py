"""What is installed: platforms and engines, those that are broken included, and what is wrong with them."""

from __future__ import annotations

import argparse
from typing import Any

from fitment.plugins import Platform, Registry, load
from fitment_matrix.cli._common import dump, remedy, show, unknown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``capabilities plugins``."""
    parser.add_argument("name", nargs="?", help="all about one plugin")


def run(arguments: argparse.Namespace) -> int:
    """List the plugins, or tell about one; one that is broken is a no."""
    registry = load()
    entries = listing(registry)
    if arguments.name is None:
        if arguments.json:
            dump(entries)
        else:
            show([_row(entry) for entry in entries], ("plugin", "kind", "state", "distribution", "version", "API", "problem"))
        return 0
    found = [entry for entry in entries if entry["name"] == arguments.name]
    if not found:
        raise unknown("plugin", arguments.name, [entry["name"] for entry in entries])
    owner = registry.platforms.get(arguments.name)
    details = [{**entry, **_details(owner)} if owner and entry["kind"] == "platform" else entry for entry in found]
    if arguments.json:
        dump(details)
    else:
        for entry in details:
            _print(entry)
    return 1 if any(entry["state"] == "broken" for entry in found) else 0


def _entry(name: str, kind: str, state: str = "ok", **more: str) -> dict[str, Any]:
    empty = dict.fromkeys(("distribution", "version", "api", "stage", "problem"), "")
    return {"name": name, "kind": kind, "state": state, **empty, **more}


def listing(registry: Registry) -> list[dict[str, Any]]:
    """Every plugin as JSON holds it."""
    return [
        *(_entry(owner.name, "platform", distribution=owner.distribution, version=owner.version, api=owner.api)
          for owner in registry.platforms.values()),
        *(_entry(name, "engine", version=engine.version) for name, engine in registry.engines.items()),
        *(_entry(broken.name, "plugin", "broken", distribution=broken.distribution, stage=broken.stage, problem=broken.problem)
          for broken in registry.broken),
    ]


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    problem = f"{entry['stage']}: {entry['problem'].splitlines()[0]}" if entry["problem"] else ""
    stated = (entry[key] or "–" for key in ("distribution", "version", "api"))
    return (entry["name"], entry["kind"], entry["state"], *stated, problem)


def _details(owner: Platform) -> dict[str, Any]:
    layout, devices = owner.kv_layout, owner.listing.devices
    return {"devices": [{"id": device.id, "title": device.title, "hardware": device.hardware} for device in devices],
            "missing": [{**reason.to_json(), "sentence": f"{reason.sentence()} {remedy(reason)}".strip()}
                        for reason in owner.listing.reasons],
            "hardware": [hw.name for hw in owner.hardware],
            "kernels": [{"op": kernel.op, "name": kernel.name, "speed": kernel.speed.name.lower(), "entry": kernel.entry,
                         "graph_safe": kernel.graph_safe.value, "condition": kernel.condition.sentence()}
                        for kernel in owner.kernels],
            "kv_layout": {"name": layout.name, "block_size": layout.block_size, "dtypes": list(layout.dtypes)},
            "abilities": {name: condition.sentence() for name, condition in owner.abilities.items()},
            "defaults": {name: list(values) for name, values in owner.defaults.items()}}


def _print(entry: dict[str, Any]) -> None:
    print(f"{entry['name']}: {entry['kind']}, {entry['state']}\n")
    rows = [(key, str(entry[key])) for key in ("distribution", "version", "api", "stage") if entry[key]]
    if "kernels" in entry:
        rows.append(("devices", ", ".join(f"{device['id']} ({device['title']})" for device in entry["devices"]) or "none"))
        rows += [("missing", reason["sentence"]) for reason in entry["missing"]]
        rows.append(("hardware", ", ".join(entry["hardware"]) or "none"))
        rows.append(("cache", f"{entry['kv_layout']['name']}, blocks of {entry['kv_layout']['block_size']}: "
                              f"{', '.join(entry['kv_layout']['dtypes'])}"))
        rows += [("ability", f"{name}: {sentence}") for name, sentence in entry["abilities"].items()]
        rows += [("default", f"{name}: {', '.join(values)}") for name, values in entry["defaults"].items()]
    show(rows)
    if entry["problem"]:
        print("".join(f"  {line}\n" for line in entry["problem"].splitlines()), end="")
    if entry.get("kernels"):
        print()
        show([(kernel["op"], kernel["name"], kernel["speed"], kernel["condition"]) for kernel in entry["kernels"]],
             ("op", "kernel", "speed", "needs"))
