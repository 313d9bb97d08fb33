"""The decision behind the gate: collect every reason, choose what was left open, size the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from fitment.conditions import Reason
from fitment.facts import Facts, Kind
from fitment.hardware import Device
from fitment.kernels import GraphSafety, Kernel, Selection
from fitment.ops import Need
from fitment.weights.specs import WeightSpec

from fitment_matrix._checks import (
    dtype_reasons,
    feature_reasons,
    is_positive,
    known_features,
    model_reasons,
    number_reasons,
    pinned,
)
from fitment_matrix._inventory import Inventory
from fitment_matrix._memory import Sizing, size, usable_bytes, weight_bytes, work_bytes
from fitment_matrix._needs import UNCAPTURED, Choice, needs
from fitment_matrix._plan import Binding, Plan
from fitment_matrix._request import DEFAULTS, OPEN, Request
from fitment_matrix._site import Site

GRAPHS = "graph_capture"
GRAPH_STEP = 8
"""Graphs are captured for 1, 2, 4 and every multiple of this many sequences."""


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass
class Refusal:
    """Every reason against a request, with what each stands against."""

    subjects: dict[Reason, tuple[str, ...]] = field(default_factory=dict)

    def add(self, reasons: Iterable[Reason], subject: str = "") -> None:
        """Note reasons, each once."""
        for reason in reasons:
            known = self.subjects.get(reason, ())
            self.subjects[reason] = known if not subject or subject in known else (*known, subject)


@dataclass(frozen=True)
class _Trial:
    """One combination of the open options and the kernels that it gets."""

    choice: Choice
    selections: tuple[tuple[Need, Selection], ...]

    @property
    def is_served(self) -> bool:
        return all(selection.chosen is not None for _, selection in self.selections)

    @property
    def speeds(self) -> list[int]:
        """The chosen kernels' speeds, slowest first: of two trials the slowest kernel decides, then the next."""
        return sorted(selection.chosen.speed if selection.chosen else -1 for _, selection in self.selections)

    @property
    def against(self) -> int:
        return len({reason for _, selection in self.selections for reason in selection.reasons})

    def kernels(self, inventory: Inventory) -> dict[tuple[str, WeightSpec | None], Kernel]:
        """The chosen kernels of the ops that take weights, by op and weight."""
        return {(need.op, spec): selection.chosen for need, selection in self.selections
                for spec in inventory.weights.get(need.op, ())
                if selection.chosen is not None and spec.facts().items() <= need.facts.items()}

    def uncapturable(self) -> list[Kernel]:
        """The kernels of a step that no graph can hold."""
        return [selection.chosen for need, selection in self.selections
                if need.op not in UNCAPTURED and selection.chosen and selection.chosen.graph_safe is GraphSafety.NEVER]


def decide(request: Request, site: Site) -> Plan | Refusal:
    """A plan, or every reason against the request."""
    refusal = Refusal()
    refusal.add((*model_reasons(request, site), *number_reasons(request)))
    values, contradictions = pinned(request)
    for subject, reason in (*feature_reasons(request, site), *contradictions):
        refusal.add((reason,), subject)
    wrong = dtype_reasons(request, site)
    refusal.add(wrong.values())
    sound = _sound(request)
    trial, choices = _choose(sound, {name: value for name, value in values.items() if name not in wrong}, site)
    for need, selection in trial.selections:
        refusal.add(selection.reasons, need.label)
    for feature in known_features(request):
        for need in feature.needs:
            refusal.add(site.serve(_within(need, trial)).reasons, feature.name)
    refusal.add(_capture_reasons(request, trial), GRAPHS)
    sized = _sized(sound, trial, site)
    refusal.add((sized.reason,) if sized.reason else ())
    return refusal if refusal.subjects else _plan(sound, trial, sized, [*choices, *sized.choices], site)


def _sound(request: Request) -> Request:
    """``request`` with its defaults in place of numbers that are out of range, so that the rest can be looked at."""
    changes: dict[str, Any] = {name: value for name, value in DEFAULTS.items() if not is_positive(getattr(request, name))}
    return replace(request, **changes)


def _choose(request: Request, values: Mapping[str, str], site: Site) -> tuple[_Trial, list[str]]:
    """The first combination of what is open whose slowest kernels are as fast as any combination's, else the nearest to one."""
    orders = {name: (values[name],) if name in values else order for name, order in site.orders().items()}
    trials = []
    for combination in product(*(orders[name] for name in OPEN)):
        choice = Choice(*combination)
        found = needs(request, site.inventory(request), choice, site.platform.kv_layout.block_size)
        trials.append(_Trial(choice, tuple((need, site.serve(need, request.kernels.get(need.op))) for need in found)))
    served = [trial for trial in trials if trial.is_served]
    if not served:
        return min(trials, key=lambda trial: trial.against), []
    fastest = max(trial.speeds for trial in served)
    best = next(trial for trial in served if trial.speeds == fastest)
    return best, [_choice_sentence(name, getattr(best.choice, name), orders[name]) for name in OPEN if name not in values]


def _choice_sentence(name: str, value: str, order: tuple[str, ...]) -> str:
    passed = order[: order.index(value)]
    if not passed:
        return f"{name} is {value}, the platform's first choice"
    return f"{name} is {value}; with {' or '.join(passed)}, which the platform would prefer, kernels are missing or slower"


def _within(need: Need, trial: _Trial) -> Need:
    """A feature's need in the call that the trial makes of the same op."""
    own = next((known.facts for known, _ in trial.selections if known.op == need.op), Facts())
    return Need(need.op, own | need.facts, need.label)


def _capture_reasons(request: Request, trial: _Trial) -> Iterator[Reason]:
    """Why graphs that were asked for cannot be captured, where it is the kernels' doing."""
    names = list(dict.fromkeys(kernel.name for kernel in trial.uncapturable()))
    if names and any(GRAPHS in feature.abilities for feature in known_features(request)):
        yield Reason("FIT-BUILD-GRAPH-SAFE", Kind.BUILD, "graph_safe", "kernels that a graph can hold",
                     f"never for {listed(names)}")


def _graph_sizes(request: Request, trial: _Trial, site: Site) -> tuple[int, ...]:
    """The batch sizes to capture, or none where the platform, the engine or a kernel cannot."""
    if site.lacks(GRAPHS) or trial.uncapturable() or (site.engine is not None and GRAPHS not in site.engine.features):
        return ()
    most = min(request.max_num_seqs, request.max_batch_tokens)
    sizes = {1, 2, 4, most, *range(GRAPH_STEP, most + 1, GRAPH_STEP)}
    return tuple(sorted(size for size in sizes if size <= most))


def _sized(request: Request, trial: _Trial, site: Site) -> Sizing:
    inventory = site.inventory(request)
    kernels = trial.kernels(inventory)
    fixed = (weight_bytes(inventory, kernels), work_bytes(request, inventory, trial.choice.dtype, kernels))
    return size(request, site.platform.kv_layout, trial.choice.kv_dtype, fixed, usable_bytes(site.where))


def _plan(request: Request, trial: _Trial, sized: Sizing, choices: list[str], site: Site) -> Plan:
    sizes = _graph_sizes(request, trial, site)
    if sizes:
        choices.append(f"decode steps of up to {sizes[-1]} sequences are captured as graphs")
    where = site.where
    return Plan(
        request=request, device=where if isinstance(where, Device) else None,
        hardware=site.registry.hardware.get(where.hardware) if isinstance(where, Device) else where, platform=site.platform,
        dtype=trial.choice.dtype, activations=trial.choice.activations, kv_dtype=trial.choice.kv_dtype,
        bindings=tuple(Binding(need.op, need, selection) for need, selection in trial.selections),
        kv_layout=site.platform.kv_layout, num_blocks=sized.num_blocks, max_model_len=sized.max_model_len,
        max_num_seqs=request.max_num_seqs, max_batch_tokens=request.max_batch_tokens, memory=sized.memory,
        graph_batch_sizes=sizes, features=request.features, choices=tuple(choices))
