"""The decision behind the gate: collect every reason, choose what was left open, size the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fitment.conditions import Reason
from fitment.facts import Facts, Kind
from fitment.hardware import Device
from fitment.kernels import Kernel
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
from fitment_matrix._needs import needs
from fitment_matrix._plan import Binding, Plan
from fitment_matrix._request import DEFAULTS, OPEN, Request
from fitment_matrix._site import Site
from fitment_matrix._trials import Trial, best_trial

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


def _choose(request: Request, values: Mapping[str, str], site: Site) -> tuple[Trial, list[str]]:
    """The best combination of what is open, and a sentence for each option that was chosen."""
    orders = {name: (values[name],) if name in values else order for name, order in site.orders().items()}
    inventory, block_size = site.inventory(request), site.platform.kv_layout.block_size
    best = best_trial(site, orders, lambda choice: needs(request, inventory, choice, block_size), request.kernels)
    return best, [_choice_sentence(name, getattr(best.choice, name), orders[name]) for name in OPEN if name not in values]


def _choice_sentence(name: str, value: str, order: tuple[str, ...]) -> str:
    passed = order[: order.index(value)]
    if not passed:
        return f"{name} is {value}, the platform's first choice"
    return f"{name} is {value}; with {' or '.join(passed)}, which the platform would prefer, kernels are missing or slower"


def _within(need: Need, trial: Trial) -> Need:
    """A feature's need in the call that the trial makes of the same op."""
    own = next((known.facts for known, _ in trial.selections if known.op == need.op), Facts())
    return Need(need.op, own | need.facts, need.label)


def _capture_reasons(request: Request, trial: Trial) -> tuple[Reason, ...]:
    """Why graphs that were asked for cannot be captured, where it is the kernels' doing."""
    return capture_reasons(trial) if any(GRAPHS in feature.abilities for feature in known_features(request)) else ()


def capture_reasons(trial: Trial) -> tuple[Reason, ...]:
    """Why a step of these kernels cannot be captured; empty when it can."""
    names = list(dict.fromkeys(kernel.name for kernel in trial.uncapturable()))
    return (Reason("FIT-BUILD-GRAPH-SAFE", Kind.BUILD, "graph_safe", "kernels that a graph can hold",
                   f"never for {listed(names)}"),) if names else ()


def _graph_sizes(request: Request, trial: Trial, site: Site) -> tuple[int, ...]:
    """The batch sizes to capture, or none where the platform, the engine or a kernel cannot."""
    if site.lacks(GRAPHS) or trial.uncapturable() or (site.engine is not None and GRAPHS not in site.engine.features):
        return ()
    most = min(request.max_num_seqs, request.max_batch_tokens)
    sizes = {1, 2, 4, most, *range(GRAPH_STEP, most + 1, GRAPH_STEP)}
    return tuple(sorted(size for size in sizes if size <= most))


def _sized(request: Request, trial: Trial, site: Site) -> Sizing:
    inventory = site.inventory(request)
    kernels = _by_weight(trial, inventory)
    fixed = (weight_bytes(inventory, kernels), work_bytes(request, inventory, trial.choice.dtype, kernels))
    return size(request, site.platform.kv_layout, trial.choice.kv_dtype, fixed, usable_bytes(site.where))


def _by_weight(trial: Trial, inventory: Inventory) -> dict[tuple[str, WeightSpec | None], Kernel]:
    """The chosen kernels of the ops that take weights, by op and weight."""
    return {(need.op, spec): selection.chosen for need, selection in trial.selections
            for spec in inventory.weights.get(need.op, ())
            if selection.chosen is not None and spec.facts().items() <= need.facts.items()}


def _plan(request: Request, trial: Trial, sized: Sizing, choices: list[str], site: Site) -> Plan:
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
