"""The conformance cases of the ops, a module each beside the op's own: what a kernel is given, what must come out, how nearly.

A module has ``cases(layout)``, which yields every :class:`~fitment.ops._cases._case.Case` for a platform with that cache layout,
within and without what kernels serve: a kernel is held to those that its condition admits, and must be refused for the others. What
must come out is computed in float64, apart from the op's reference implementation, which is held to it like any other kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fitment.hardware import KVLayout
    from fitment.ops._cases._case import Case


@cache
def cases(op: str, layout: KVLayout) -> tuple[Case, ...]:
    """Every case of an op (imports torch)."""
    found: Iterable[Case] = import_module(f"{__name__}.{op}").cases(layout)
    return tuple(found)
