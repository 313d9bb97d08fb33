"""Ops: a module each, with the contract and the reference implementation in plain torch; cases and tolerances lie in ``_cases``.

This module is the table of them and imports no torch. Terms that all contracts share:

- *T* is the activation dtype, the same for all T tensors of a call. Integer tensors are int32 and contiguous.
- Tensors are preallocated, on one device; the last axes are contiguous, and the first may be strided (columns of a wider buffer).
- What a contract does not say is written, stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from fitment.conditions import ALWAYS, Condition
from fitment.facts import Facts
from fitment.kernels import GraphSafety, Kernel, Speed

OPS: tuple[str, ...] = tuple(sorted(module.name for module in iter_modules(__path__) if module.name[0] != "_"))
"""The names of all ops: this folder's listing."""

WEIGHTED = frozenset(("linear", "embedding"))
"""Ops whose kernels depend on a weight's family."""


NO_FACTS = Facts()


@dataclass(frozen=True)
class Need:
    """One op that something needs, with the facts of the call; ``label`` says what for."""

    op: str
    facts: Facts = NO_FACTS
    label: str = ""


@cache
def op(name: str) -> Any:
    """The module of an op (imports torch), which has its ``reference``."""
    return import_module(f"{__name__}.{name}")


def reference_kernels(platform: str, condition: Condition = ALWAYS) -> tuple[Kernel, ...]:
    """The reference implementation of every op as kernels that a platform whose torch device works can register."""
    return tuple(
        Kernel(name, f"{platform}.reference.{name}", f"fitment.ops.{name}:reference", condition, Speed.REFERENCE,
               sources=(f"ops/{name}.py",), graph_safe=GraphSafety.NEVER)
        for name in OPS
    )
