"""Finding the null platform's devices: there is always one."""

from __future__ import annotations

from fitment.facts import Facts
from fitment.hardware import Device, Listing


def list_devices() -> Listing:
    """One device with the facts of the profile ``null``."""
    facts = Facts({"arch": "null_1", "arch_family": "null", "vendor": "nobody", "memory_bytes": 1 << 33, "null.tile_rows": 16,
                   "memory_available_bytes": 1 << 33, "dtypes": frozenset(("fp32", "bf16"))})
    return Listing((Device("null:0", "null", "null", "a fake device on torch's reference ops", facts, "cpu"),))
