"""What commands that ask the gate have in common: which options a request has, and how they are written."""

from __future__ import annotations

import argparse
import re

from fitment_matrix._request import DEFAULTS, OPEN

OPTIONS: tuple[str, ...] = (*OPEN, *DEFAULTS)
"""A request's options that are one value each, by their names in ``Request``."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def memory(text: str) -> int:
    """Bytes of ``512M``, ``4G``, ``4GiB`` or a plain number; an argument's type."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory such as 512M or 4G")
    return int(float(match[1]) * _UNITS[match[2].upper()])
