"""The plugin of the null platform. A vendor starts from a copy of this folder."""

from __future__ import annotations

from pathlib import Path

from fitment.conditions import ALWAYS, Condition, equals
from fitment.facts import FactKey, Kind
from fitment.hardware import Hardware, KVLayout, Listing, load_hardware
from fitment.hookspecs import hookimpl
from fitment.kernels import Kernel
from fitment.null.detect import list_devices
from fitment.ops import reference_kernels

FITMENT_API = ">=1.0,<2"
PLATFORM = "null"


@hookimpl
def fitment_fact_keys() -> list[FactKey]:
    """One key, to show how a vendor declares its own."""
    return [FactKey("null.tile_rows", "int", Kind.HARDWARE, "Rows of the fake matrix unit's tile.", "rows")]


@hookimpl
def fitment_hardware() -> tuple[Hardware, ...]:
    """The parts in ``hardware.toml``."""
    return load_hardware(Path(__file__).with_name("hardware.toml"), PLATFORM)


@hookimpl
def fitment_devices() -> Listing:
    """One fake device."""
    return list_devices()


@hookimpl
def fitment_kernels() -> tuple[Kernel, ...]:
    """The reference implementation of every op."""
    return reference_kernels(PLATFORM, equals("arch", "null_1"))


@hookimpl
def fitment_kv_layout() -> KVLayout:
    """The reference's layout."""
    return KVLayout("null", 16, ("block", "slot", "head", "dim"), ("block", "slot", "head", "dim"), ("fp32", "bf16", "fp16"))


@hookimpl
def fitment_abilities() -> dict[str, Condition]:
    """It replays steps."""
    return {"graph_capture": ALWAYS}


@hookimpl
def fitment_defaults() -> dict[str, tuple[str, ...]]:
    """It prefers exactness."""
    return {"dtype": ("fp32",), "activations": ("fp32",), "kv_dtype": ("fp32",)}


@hookimpl
def fitment_graph_capture() -> str:
    """The capture class."""
    return "fitment.null.graph:NullGraphCapture"
