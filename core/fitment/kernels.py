"""Kernels: what a platform registers for an op, and the selection of one of them with its trace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fitment.conditions import ALWAYS, Condition, Reason
from fitment.errors import FitmentError
from fitment.facts import FactRegistry, Kind, Value


class Speed(IntEnum):
    """How a kernel computes, the faster the greater.

    *native*: the hardware's own path. *portable*: on the packed weights, anywhere. *reference*: torch, for truth, never for
    speed.
    """

    REFERENCE = 0
    PORTABLE = 1
    NATIVE = 2


class GraphSafety(StrEnum):
    """How far a kernel can be captured into a graph."""

    ALWAYS = "always"
    UNIFORM_BATCH = "uniform_batch"
    SINGLE_TOKEN = "single_token"
    NEVER = "never"


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op.

    ``entry`` is ``"module:function"`` with the op's signature, imported only when bound. ``prepare``, for ops that take weights,
    is ``"module:function"`` from a weight family's tensor to the object that ``entry`` receives. ``condition`` covers device
    facts and the call alike. Among admitted kernels the greater ``speed`` wins, then the greater ``priority``, then the name.
    ``sources`` are files, relative to the entry's top-level package, whose digest dates the kernel's evidence.
    """

    op: str
    name: str
    entry: str
    condition: Condition = ALWAYS
    speed: Speed = Speed.PORTABLE
    priority: int = 0
    prepare: str | None = None
    sources: tuple[str, ...] = ()
    graph_safe: GraphSafety = GraphSafety.ALWAYS

    @property
    def package(self) -> str:
        """The top-level package of ``entry``, which has the ``sources``."""
        return self.entry.partition(":")[0].partition(".")[0]

    def load(self) -> Callable[..., Any]:
        """The function behind ``entry``; imports its module."""
        function: Callable[..., Any] = load_entry(self.entry)
        return function

    def load_prepare(self) -> Callable[[Any], Any]:
        """The function behind ``prepare``; the identity when there is none."""
        return load_entry(self.prepare) if self.prepare else _identity


def _identity(weight: Any) -> Any:
    return weight


@cache
def load_entry(entry: str) -> Any:
    """The object that ``"module:attribute"`` names.

    Raises:
        ImportError: the module cannot be imported or has no such attribute; the message names ``entry``.
        FitmentError: the module refused to be set up, as by a variable that is wrong.
    """
    name, _, attribute = entry.partition(":")
    try:
        module = import_module(name)
    except FitmentError:
        raise
    except Exception as error:
        raise ImportError(f"entry {entry!r}: module {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ImportError(f"entry {entry!r}: module {name!r} has no attribute {attribute!r}") from error


def sources_digest(kernel: Kernel) -> str | None:
    """SHA-256 over a kernel's sources, sorted: each one's name, a zero byte, its content and a zero byte. Imports nothing.

    None when the kernel names no sources, or one of them is not there.
    """
    return _digest(kernel.package, tuple(sorted(kernel.sources))) if kernel.sources and not missing_sources(kernel) else None


def missing_sources(kernel: Kernel) -> tuple[str, ...]:
    """The sources that a kernel names and its package does not have."""
    return tuple(source for source in kernel.sources if _source(kernel.package, source) is None)


def _source(package: str, source: str) -> Path | None:
    spec = find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((path for folder in folders if (path := Path(folder) / source).is_file()), None)


@cache
def _digest(package: str, sources: tuple[str, ...]) -> str:
    total = hashlib.sha256()
    for source in sources:
        path = _source(package, source)
        assert path is not None, "the caller looks first"
        total.update(source.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


@dataclass(frozen=True)
class Verdict:
    """What selection thought of one kernel: admitted, or rejected with all reasons."""

    kernel: Kernel
    reasons: tuple[Reason, ...]

    @property
    def is_admitted(self) -> bool:
        """Whether nothing stands against the kernel."""
        return not self.reasons

    @property
    def is_unknown(self) -> bool:
        """Whether only missing facts stand against it."""
        return bool(self.reasons) and all(reason.unknown for reason in self.reasons)


@dataclass(frozen=True)
class Selection:
    """The chosen kernel, if any, and the trace: a verdict on every kernel registered for the op, best first."""

    op: str
    chosen: Kernel | None
    trace: tuple[Verdict, ...] = field(repr=False)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why nothing was chosen: the reasons of the kernel that came nearest; empty when one was chosen."""
        if self.chosen is not None:
            return ()
        if not self.trace:
            return (Reason(f"FIT-OP-{self.op.upper().replace('_', '-')}", Kind.BUILD, "op", f"a kernel for {self.op}", "none",
                           "install a platform that registers one"),)
        return self.trace[0].reasons


def select(
    op: str,
    facts: Mapping[str, Value],
    kernels: Iterable[Kernel],
    registry: FactRegistry,
    wanted: str | None = None,
) -> Selection:
    """Choose a kernel for ``op``.

    Args:
        op: The op's name.
        facts: Device facts and the call's facts in one mapping.
        kernels: What the device's platform registered; those of other ops are passed over.
        registry: The declared fact keys, for the reasons' kinds and remedies.
        wanted: A kernel that the operator asked for by name: it is used or refused, never replaced.

    Returns:
        The choice and a verdict on every kernel of the op.
    """
    verdicts = [Verdict(kernel, kernel.condition.check(facts, registry)) for kernel in kernels if kernel.op == op]
    if wanted is not None:
        named = [verdict for verdict in verdicts if verdict.kernel.name == wanted]
        if not named:
            known = ", ".join(sorted(verdict.kernel.name for verdict in verdicts)) or "none"
            reason = Reason("FIT-REQ-KERNEL", Kind.REQUEST, "kernel", f"kernel {wanted!r} for {op}", f"not among {known}",
                            "name one of these")
            verdicts = [Verdict(verdict.kernel, (*verdict.reasons, reason)) for verdict in verdicts]
        else:
            verdicts = named
    verdicts.sort(key=lambda v: (not v.is_admitted, not v.is_unknown, len(v.reasons) if v.reasons else 0,
                                 -v.kernel.speed, -v.kernel.priority, v.kernel.name))
    chosen = verdicts[0].kernel if verdicts and verdicts[0].is_admitted else None
    return Selection(op, chosen, tuple(verdicts))
