"""The requests nearest to one that was refused that the gate does admit."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from fitment.hardware import Device, Hardware
from fitment_matrix._checks import is_positive
from fitment_matrix._decide import Refusal, decide
from fitment_matrix._plan import Plan
from fitment_matrix._request import DEFAULTS, FLAGS, OPEN, Request
from fitment_matrix._site import Site, name_of

MOST = 3
ATTEMPTS = 8
"""Orders in which what gave way is restored; each can find another request."""

SMALLEST = {"max_num_seqs": 1, "max_batch_tokens": 256}
"""How far numbers that cost memory are lowered."""

ROUND = 1024
"""A shortened context is a multiple of this, where it is longer."""

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Nearest:
    """A request that is admitted: ``options`` as the command line has them, one sentence, and the request itself with where."""

    options: str
    sentence: str
    request: Request
    where: Device | Hardware

    @property
    def place(self) -> str:
        """The device's id or the profile's name."""
        return name_of(self.where)


@dataclass(frozen=True)
class _Relaxation:
    """One thing of a request that can give way."""

    name: str
    apply: Callable[[Request], Request]


def nearest(request: Request, site: Site) -> tuple[Nearest, ...]:
    """At most three admitted requests, best first: the fewest changes here, then other hardware with everything as asked."""
    here = [near for _, near in sorted(_changed(request, site), key=lambda item: item[0])]
    found = [*here[: MOST - 1], *_elsewhere(request, site), *here[MOST - 1 :]]
    return tuple(found[:MOST])


def _relaxations(request: Request) -> Iterator[_Relaxation]:
    """What can give way, what matters most first."""
    def without(feature: str) -> Callable[[Request], Request]:
        return lambda r: replace(r, features=tuple(name for name in r.features if name != feature))

    def unbound(op: str) -> Callable[[Request], Request]:
        return lambda r: replace(r, kernels={other: name for other, name in r.kernels.items() if other != op})

    def changed(name: str, value: int | None) -> _Relaxation:
        changes: dict[str, Any] = {name: value}
        return _Relaxation(name, lambda r: replace(r, **changes))

    yield from (_Relaxation(feature, without(feature)) for feature in request.features)
    yield from (_Relaxation(op, unbound(op)) for op in request.kernels)
    for name in ("dtype", "activations", "max_model_len", "kv_dtype", "kv_memory_bytes"):
        if getattr(request, name) is not None:
            yield changed(name, None)
    for name, smallest in SMALLEST.items():
        if not is_positive(getattr(request, name)):
            yield changed(name, DEFAULTS[name])
        elif getattr(request, name) > smallest:
            yield changed(name, smallest)


def _changed(request: Request, site: Site) -> Iterator[tuple[int, Nearest]]:
    """(number of changes, admitted request) here: all that can give way does, then what need not is restored."""
    everything = list(_relaxations(request))

    def admitted(relaxed: Sequence[_Relaxation]) -> Plan | None:
        tried = request
        for relaxation in relaxed:
            tried = relaxation.apply(tried)
        return _admitted(tried, site)

    def least(first: Sequence[_Relaxation]) -> list[_Relaxation]:
        kept = everything
        for relaxation in (*first, *everything):
            fewer = [item for item in kept if item is not relaxation]
            if len(fewer) < len(kept) and admitted(fewer) is not None:
                kept = fewer
        return kept

    if admitted(everything) is None:
        return
    seen: set[str] = set()
    spared: list[tuple[_Relaxation, ...]] = [()]  # what to restore before anything else
    for first in islice(spared, ATTEMPTS):  # which grows meanwhile
        kept = least(first)
        plan = admitted(kept)
        near = plan and _said(request, plan, site)
        if near and near.options not in seen:
            seen.add(near.options)
            spared += [(*first, given_up) for given_up in kept]
            yield len(kept), near


def _admitted(request: Request, site: Site) -> Plan | None:
    decision = decide(request, site)
    return None if isinstance(decision, Refusal) else decision


def _said(request: Request, plan: Plan, site: Site) -> Nearest | None:
    """The plan as a request that spells out what was chosen for what gave way; None should that not be admitted after all."""
    changed, length = plan.request, plan.max_model_len
    changes: dict[str, Any] = {name: getattr(plan, name) for name in OPEN if getattr(request, name) != getattr(changed, name)}
    if changed.max_model_len != request.max_model_len:
        changes["max_model_len"] = length - length % ROUND if length > ROUND else length
    if changed.kv_memory_bytes != request.kv_memory_bytes:
        one = -(-plan.max_model_len // plan.kv_layout.block_size) * (plan.memory.cache // plan.num_blocks)
        unit = _MIB if one >= 16 * _MIB else _KIB
        changes["kv_memory_bytes"] = -(-one // unit) * unit
    changed = _raised(request, replace(changed, **changes), site)
    admitted = _admitted(changed, site)
    return Nearest(options_text(request, changed), admitted.summary(), changed, site.where) if admitted else None


def _raised(request: Request, changed: Request, site: Site) -> Request:
    """``changed`` with numbers that were lowered to the least raised again: half of what was asked, half of that, and so on."""
    for name, smallest in SMALLEST.items():
        value = getattr(request, name)
        if not is_positive(value) or getattr(changed, name) == value:
            continue
        while (value := value // 2) > smallest:
            changes: dict[str, Any] = {name: value}
            if _admitted(replace(changed, **changes), site):
                changed = replace(changed, **changes)
                break
    return changed


def options_text(asked: Request, changed: Request) -> str:
    """What of ``asked`` to change on the command line to get ``changed``."""
    parts = [f"{FLAGS[name]} {getattr(changed, name)}"
             for name in ("dtype", "activations", "kv_dtype", "max_model_len", "max_num_seqs", "max_batch_tokens")
             if getattr(asked, name) != getattr(changed, name)]
    if asked.kv_memory_bytes != changed.kv_memory_bytes and changed.kv_memory_bytes is not None:
        number = changed.kv_memory_bytes
        parts.append(f"{FLAGS['kv_memory_bytes']} {f'{number // _KIB}K' if number % _MIB else f'{number // _MIB}M'}")
    parts += [f"without {FLAGS['features']} {shlex.quote(name)}" for name in asked.features if name not in changed.features]
    parts += [f"without {FLAGS['kernels']} {shlex.quote(f'{op}={name}')}" for op, name in asked.kernels.items()
              if op not in changed.kernels]
    return " ".join(parts)


def _elsewhere(request: Request, site: Site) -> list[Nearest]:
    """Other devices that are here, then other profiles, that run everything as asked: the fastest first, then the smallest."""
    here, registry = site.where, site.registry
    others: list[Device | Hardware] = list(registry.hardware.values())
    if isinstance(here, Device):
        own = here.hardware
        others = [*registry.devices, *(hw for name, hw in registry.hardware.items() if name != own)]
    found: list[tuple[tuple[Any, ...], Nearest]] = []
    for other in others:
        plan = _admitted(request, site.at(other)) if other != here else None
        if plan is None:
            continue
        slowest_first = sorted(-binding.kernel.speed for binding in plan.bindings)[::-1]
        rank = (isinstance(other, Hardware), slowest_first, other.facts.get("memory_bytes", 0), plan.where)
        option = f"--device {other.id}" if isinstance(other, Device) else f"--hardware {shlex.quote(other.name)}"
        found.append((rank, Nearest(option, "everything as asked", request, other)))
    return [near for _, near in sorted(found, key=lambda item: item[0])]
