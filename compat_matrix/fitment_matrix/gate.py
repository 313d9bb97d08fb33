"""The gate: a request and hardware in, a plan or every reason against it out; before a weight is read, before torch.

``admit`` is a pure function of data and takes milliseconds. An engine starts from a :class:`Plan` and from nothing else; what the
plan chose by itself, it lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fitment.conditions import Reason
from fitment.errors import FitmentError
from fitment.hardware import Device, Hardware
from fitment.hookspecs import EngineInfo
from fitment.plugins import Registry
from fitment_matrix._decide import Refusal, decide, listed
from fitment_matrix._memory import gib
from fitment_matrix._nearest import Nearest, nearest
from fitment_matrix._plan import Binding, MemoryEstimate, Plan
from fitment_matrix._request import Request
from fitment_matrix._site import Site, name_of

__all__ = ["Binding", "MemoryEstimate", "Nearest", "Plan", "Request", "Unfit", "admit", "admit_first"]


class Unfit(FitmentError):
    """A request that cannot run where it was asked to.

    Attributes:
        where: The device or the profile.
        place: Its id or name.
        reasons: Every reason, each once.
        subjects: For each reason, what it stands against: ops, features; empty where it is the request as a whole.
        nearest: Requests that the gate has found to be admitted, best first, at most three.
    """

    def __init__(self, where: Device | Hardware, subjects: Mapping[Reason, tuple[str, ...]], near: Sequence[Nearest]) -> None:
        self.where = where
        self.place = name_of(where)
        self.subjects = dict(subjects)
        self.reasons = tuple(subjects)
        self.nearest = tuple(near)
        super().__init__(self.text())

    def headline(self) -> str:
        """One line: what cannot run the request."""
        count = len(self.reasons)
        return f"{describe(self.where)} cannot run this request: {count} reason{'s' if count > 1 else ''}."

    def rows(self) -> list[tuple[str, str]]:
        """(code, sentence) for each reason."""
        return [(reason.code, reason_sentence(reason, self.subjects[reason])) for reason in self.reasons]

    def text(self) -> str:
        """The message: the answer, the reasons, the way out."""
        width = max(len(code) for code, _ in self.rows())
        lines = [self.headline(), "", *(f"  {code:<{width}}  {sentence}" for code, sentence in self.rows())]
        here = [near for near in self.nearest if not (isinstance(self.where, Device) and isinstance(near.where, Hardware))]
        if here:
            width = max(len(near.options) for near in here)
            lines += ["", "Nearest that would run, best first", *(f"  {near.options:<{width}}  {near.sentence}" for near in here)]
        return "\n".join(lines)


def reason_sentence(reason: Reason, subjects: Sequence[str]) -> str:
    """A reason with what it stands against, at most three of them by name."""
    if not subjects:
        return f"the request {reason.sentence()}{_remedy(reason)}"
    words = reason.sentence() if len(subjects) == 1 else reason.sentence().replace("needs ", "need ", 1)
    return f"{listed(subjects)} {words}{_remedy(reason)}"


def _remedy(reason: Reason) -> str:
    """What to do, where it is more than another value of an option; which value, the nearest requests say."""
    return f" → {reason.remedy}" if reason.remedy and not reason.remedy.startswith("--") else ""


def describe(where: Device | Hardware) -> str:
    """A device or profile with its architecture and memory: ``t4 (sm_75, 16.0 GiB)``."""
    name = name_of(where)
    facts = [str(where.facts[key]) for key in ("arch",) if key in where.facts and where.facts[key] != name]
    facts += [gib(where.facts[key]) for key in ("memory_bytes",) if key in where.facts]
    return f"{name} ({', '.join(facts)})" if facts else name


def admit(request: Request, where: Device | Hardware, registry: Registry, engine: EngineInfo | None = None) -> Plan:
    """Decide whether a request can run, and how.

    Args:
        request: What is asked.
        where: A device that is here, or a profile.
        registry: The installed plugins.
        engine: What would run it; None checks no architecture and no engine's features.

    Returns:
        The plan.

    Raises:
        Unfit: with every reason, and the nearest requests that would be admitted.
        FitmentError: ``where`` belongs to no platform that loaded.
    """
    site = Site(where, registry, engine)
    decision = decide(request, site)
    if isinstance(decision, Refusal):
        raise Unfit(where, decision.subjects, nearest(request, site))
    return decision


def admit_first(request: Request, places: Iterable[Device | Hardware], registry: Registry, engine: EngineInfo | None = None) -> Plan:
    """The plan for the first of ``places`` (at least one) that admits the request.

    Raises:
        Unfit: none does; the refusal of the first.
    """
    first: Unfit | None = None
    for where in places:
        try:
            return admit(request, where, registry, engine)
        except Unfit as unfit:
            first = first or unfit
    assert first is not None, "there is a place to ask about"
    raise first
