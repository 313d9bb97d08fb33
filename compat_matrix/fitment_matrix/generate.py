"""The matrix: every format, encoding and feature on every profile, each cell derived from kernels' conditions, none typed in.

A cell's status is the worst of the kernels that it needs: ``native``, ``portable``, ``reference`` (torch computes it: right, and
slow), ``unsupported``, or ``unknown`` where a fact is missing that would decide it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from fitment.conditions import Reason
from fitment.facts import Facts, Kind
from fitment.features import FEATURES, Feature
from fitment.formats import Format, formats
from fitment.hardware import Device
from fitment.kernels import Kernel, Speed
from fitment.ops import OPS, WEIGHTED, Need
from fitment.plugins import Registry
from fitment.weights.specs import DenseSpec, WeightSpec
from fitment_matrix._decide import GRAPHS, capture_reasons
from fitment_matrix._request import OPEN
from fitment_matrix._site import Site
from fitment_matrix._trials import Choice, Trial, best_trial
from fitment_matrix.evidence import Book, Evidence

ASSUMED = Facts({"head_size": 128, "query_per_kv": 4, "query_length": 2048, "rotary_size": 128, "vocab_size": 128256})
"""The call that stands for all where a cell belongs to no model: that of a Llama of eight billion parameters."""

ASSUMED_WEIGHT = DenseSpec("bf16")
"""Its weights."""

ACTIVATIONS = ("fp32", "bf16", "fp16", "int8", "fp8_e4m3fn")
"""What an encoding's cell is also asked for."""


class Status(StrEnum):
    """What a cell says."""

    NATIVE = "native"
    PORTABLE = "portable"
    REFERENCE = "reference"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"

    @property
    def is_served(self) -> bool:
        """Whether it runs at all."""
        return self not in (Status.UNSUPPORTED, Status.UNKNOWN)


_BY_SPEED = {Speed.NATIVE: Status.NATIVE, Speed.PORTABLE: Status.PORTABLE, Speed.REFERENCE: Status.REFERENCE}
_WORST_FIRST = (Status.REFERENCE, Status.PORTABLE, Status.NATIVE)


@dataclass(frozen=True)
class Cell:
    """One answer.

    Attributes:
        hardware: The profile's name or the device's id.
        kind: format, encoding, feature or op.
        thing: What is asked about: ``gguf``, ``gguf:Q4_1``, ``chunked_prefill``, ``linear``.
        status: The answer.
        trial: What was tried, with the traces; None where no kernel comes into it.
        reasons: Why not, with what each stands against; empty when it runs.
        evidence: The weakest of its kernels'.
        note: What else there is to say; a partial cell has one.
        by_activations: For encodings, the status for each element type of activations under which it runs.
    """

    hardware: str
    kind: str
    thing: str
    status: Status
    trial: Trial | None = None
    reasons: tuple[tuple[str, Reason], ...] = ()
    evidence: Evidence = field(default_factory=Evidence)
    note: str = ""
    by_activations: Mapping[str, Status] = field(default_factory=dict)

    @property
    def kernels(self) -> dict[str, Kernel]:
        """The chosen kernels by op."""
        selections = self.trial.selections if self.trial and self.status.is_served else ()
        return {need.op: selection.chosen for need, selection in selections if selection.chosen}

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; the traces are left to ``explain``."""
        return {"hardware": self.hardware, "kind": self.kind, "thing": self.thing, "status": self.status.value,
                "kernels": {op: kernel.name for op, kernel in self.kernels.items()},
                "reasons": [{"against": subject, **reason.to_json()} for subject, reason in self.reasons],
                "evidence": self.evidence.to_json(), "note": self.note,
                "by_activations": {name: status.value for name, status in self.by_activations.items()}}


class Survey:
    """The cells of one profile or device."""

    def __init__(self, site: Site, book: Book) -> None:
        self._site = site
        self._book = book
        self._profile = site.where.hardware if isinstance(site.where, Device) else site.name

    def cells(self) -> Iterator[Cell]:
        """Every format with the encodings that it reads, then every feature."""
        for fmt in formats().values():
            encodings = [self.encoding(fmt, name) for name in fmt.specs]
            yield self._whole(fmt, encodings)
            yield from encodings
        for feature in FEATURES.values():
            yield self.feature(feature)

    def format(self, fmt: Format) -> Cell:
        """A format: the worst of the encodings that are served; a note where some are not."""
        return self._whole(fmt, [self.encoding(fmt, name) for name in fmt.specs])

    def _whole(self, fmt: Format, encodings: list[Cell]) -> Cell:
        served = [cell for cell in encodings if cell.status.is_served]
        if not served:
            status = Status.UNKNOWN if all(cell.status is Status.UNKNOWN for cell in encodings) else Status.UNSUPPORTED
            reasons = tuple(dict.fromkeys(reason for cell in encodings for reason in cell.reasons))
            return Cell(self._site.name, "format", fmt.name, status, None, reasons)
        worst = min(served, key=lambda cell: (_WORST_FIRST.index(cell.status), cell.evidence.level))
        number = len(encodings) + len(fmt.recognised)
        note = "" if len(served) == number else f"{len(served)} of {number} encodings"
        evidence = min((cell.evidence for cell in served), key=lambda evidence: evidence.level)
        return Cell(self._site.name, "format", fmt.name, worst.status, worst.trial, (), evidence, note)

    def encoding(self, fmt: Format, encoding: str) -> Cell:
        """An encoding of a format: linear layers and an embedding table in it."""
        thing, spec = f"{fmt.name}:{encoding}", fmt.specs.get(encoding)
        if spec is None:
            reason = Reason("FIT-REQ-FORMAT", Kind.REQUEST, "format", f"tensors in {' '.join(fmt.specs)}", encoding,
                            "convert it to one of these")
            return Cell(self._site.name, "encoding", thing, Status.UNSUPPORTED, None, ((thing, reason),))
        cell = self._cell("encoding", thing, self._trial({}, lambda choice: _weight_needs(spec, choice)))
        by_activations = {}
        for activations in ACTIVATIONS:
            trial = self._trial({"activations": activations}, lambda choice: _weight_needs(spec, choice))
            if trial.is_served:
                by_activations[activations] = _status(trial)
        return replace(cell, by_activations=by_activations)

    def feature(self, feature: Feature) -> Cell:
        """A feature: the worst of what it needs; one that needs nothing of the hardware runs wherever an engine has it."""
        pins = {name: str(need.facts[name]) for need in feature.needs for name in OPEN if name in need.facts}
        reasons = [(feature.name, reason) for ability in feature.abilities for reason in self._site.lacks(ability)]
        layout = self._site.platform.kv_layout
        if pins.get("kv_dtype", layout.dtypes[0]) not in layout.dtypes:
            reasons.append((feature.name, Reason("FIT-REQ-KV-DTYPE", Kind.REQUEST, "kv_dtype",
                                                 f"kv_dtype in {' '.join(layout.dtypes)}", pins["kv_dtype"])))
        trial = self._trial(pins, lambda choice: [self._call(need, choice) for need in self._needs_of(feature)])
        if GRAPHS in feature.abilities:
            reasons += [(feature.name, reason) for reason in capture_reasons(trial)]
        cell = self._cell("feature", feature.name, trial)
        if reasons:
            return replace(cell, status=Status.UNKNOWN if all(reason.unknown for _, reason in reasons) else Status.UNSUPPORTED,
                           reasons=tuple(reasons), evidence=Evidence())
        return replace(cell, note="" if feature.needs or feature.abilities else "asks nothing of the hardware")

    def op(self, op: str) -> Cell:
        """An op of the assumed call."""
        return self._cell("op", op, self._trial({}, lambda choice: [self._call(Need(op), choice)]))

    def _needs_of(self, feature: Feature) -> tuple[Need, ...]:
        """What a feature needs; a captured step needs every op."""
        return tuple(Need(op) for op in OPS) if GRAPHS in feature.abilities else feature.needs

    def _call(self, need: Need, choice: Choice) -> Need:
        """``need`` with the facts of the assumed call."""
        block_size = self._site.platform.kv_layout.block_size
        facts = ASSUMED | {"dtype": choice.dtype, "kv_dtype": choice.kv_dtype, "block_size": block_size}
        if need.op in WEIGHTED:
            facts = facts | {"activations": choice.activations} | ASSUMED_WEIGHT.facts()
        return Need(need.op, facts | need.facts, need.label or need.op)

    def _trial(self, pins: Mapping[str, str], needs: Callable[[Choice], Iterable[Need]]) -> Trial:
        """The best combination of what ``pins`` leaves open."""
        return best_trial(self._site, {**self._site.orders(), **{name: (value,) for name, value in pins.items()}}, needs)

    def _cell(self, kind: str, thing: str, trial: Trial) -> Cell:
        status = _status(trial)
        reasons = dict.fromkeys((need.label, reason) for need, selection in trial.selections for reason in selection.reasons)
        found = [self._book.of(self._profile, kernel) for kernel in trial.kernels] if status.is_served else []
        weakest = min(found, key=lambda evidence: evidence.level, default=Evidence())
        return Cell(self._site.name, kind, thing, status, trial, tuple(reasons), weakest)


def _weight_needs(spec: WeightSpec, choice: Choice) -> list[Need]:
    facts = spec.facts() | {"dtype": choice.dtype}
    return [Need("linear", facts | {"activations": choice.activations}, "linear"), Need("embedding", facts, "embedding")]


def _status(trial: Trial) -> Status:
    """The slowest kernel's, or why there is none: unknown where only facts are missing."""
    if trial.is_served:
        return min((_BY_SPEED[kernel.speed] for kernel in trial.kernels), key=_WORST_FIRST.index, default=Status.NATIVE)
    missing = [selection for _, selection in trial.selections if selection.chosen is None]
    could = all(any(verdict.is_unknown for verdict in selection.trace) for selection in missing)
    return Status.UNKNOWN if could else Status.UNSUPPORTED


@dataclass(frozen=True)
class Slowness:
    """Linear layers that torch computes: by which kernel, and the reason why by no other; None where there is no other."""

    kernel: Kernel
    reason: Reason | None

    def sentence(self) -> str:
        """Why, and what to do about it."""
        words = f"torch computes linear layers ({self.kernel.name})"
        if self.reason is None:
            return f"{words}; the platform has no other kernel for them"
        return f"{words}: {self.reason.sentence()}{f' → {self.reason.remedy}' if self.reason.remedy else ''}"


def slowness(site: Site, trial: Trial | None) -> Slowness | None:
    """Whether linear layers are slow, and why: what the platform says is missing here, else what a faster kernel needs."""
    for need, selection in trial.selections if trial else ():
        if need.op == "linear" and selection.chosen is not None and selection.chosen.speed is Speed.REFERENCE:
            missing = site.platform.listing.reasons if isinstance(site.where, Device) else ()
            faster = [v.reasons for v in selection.trace if v.kernel.speed > Speed.REFERENCE and v.reasons]
            reasons = (*missing, *(min(faster, key=len) if faster else ()))
            return Slowness(selection.chosen, reasons[0] if reasons else None)
    return None


def generate(registry: Registry, book: Book, platforms: Collection[str] | None = None) -> dict[str, Any]:
    """The matrix over all profiles, as JSON holds it.

    Args:
        registry: The installed plugins.
        book: The evidence.
        platforms: Of these platforms only; default all.
    """
    profiles = [hw for hw in registry.hardware.values() if platforms is None or hw.platform in platforms]
    engines = {name: set(engine.features) for name, engine in sorted(registry.engines.items())}
    return {
        "schema": 1,
        "statuses": [status.value for status in Status],
        "assumed": {**ASSUMED.to_json(), "weight": str(ASSUMED_WEIGHT)},
        "hardware": {hw.name: {"platform": hw.platform, "title": hw.title, "facts": hw.facts.to_json()} for hw in profiles},
        "formats": {fmt.name: {"title": fmt.title, "encodings": list(fmt.specs), "recognised": list(fmt.recognised)}
                    for fmt in formats().values()},
        "features": {feature.name: {"doc": feature.doc, "engines": [name for name, has in engines.items() if feature.name in has]}
                     for feature in FEATURES.values()},
        "cells": [cell.to_json() for hw in profiles for cell in Survey(Site(hw, registry), book).cells()],
    }
