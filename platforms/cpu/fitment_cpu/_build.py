"""What of the native extension is here, without importing it or torch."""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from functools import cache
from importlib.util import find_spec

from fitment.errors import FitmentError

ISA_VARIABLE = "FITMENT_CPU_ISA"

LEVELS: dict[str, frozenset[str]] = {
    "generic": frozenset(),
    "avx2": frozenset(("avx2", "fma", "f16c")),
    "avx512": frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl")),
    "avx512_vnni": frozenset(("avx512_vnni",)),
    "avx512_bf16": frozenset(("avx512_bf16",)),
}
"""The instruction sets that the extension is built for, lowest first, each with the features that it needs beyond the one before."""


@cache
def is_built() -> bool:
    """Whether the extension was built when this distribution was installed."""
    return find_spec("fitment_cpu._native") is not None


def levels(isa: AbstractSet[str]) -> frozenset[str]:
    """The levels that a processor with the features ``isa`` (the Linux kernel's names) runs, up to ``FITMENT_CPU_ISA``.

    Raises:
        FitmentError: the variable names no level.
    """
    limit = os.environ.get(ISA_VARIABLE, "")
    if limit and limit not in LEVELS:
        raise FitmentError(f"{ISA_VARIABLE}={limit}: no such level; levels are {', '.join(LEVELS)}")
    found = []
    for name, needed in LEVELS.items():
        if not needed <= isa:
            break
        found.append(name)
        if name == limit:
            break
    return frozenset(found)


def native_levels(isa: AbstractSet[str]) -> frozenset[str]:
    """The levels of native kernels that were built and that run on a processor with the features ``isa``."""
    return levels(isa) if is_built() else frozenset()
