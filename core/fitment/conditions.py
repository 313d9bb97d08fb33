"""Conditions: what something requires, as data that can be evaluated for hardware nobody has, printed, and serialised.

``check(facts)`` returns every failing :class:`Reason` at once. A fact that is missing fails as *unknown*, which is not
*unsupported*: the answer may change when somebody finds the fact out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from fitment.facts import FactRegistry, Kind, Value, to_json

_MISSING = object()


@dataclass(frozen=True)
class Reason:
    """One requirement that a set of facts does not meet.

    ``code`` is stable (``FIT-HW-ARCH``); ``unknown`` says that the fact is missing rather than wrong.
    """

    code: str
    kind: Kind
    key: str
    wanted: str
    found: str
    remedy: str = ""
    unknown: bool = False

    def sentence(self) -> str:
        """The reason in words: what is needed and what there is."""
        return f"needs {self.wanted}; {self.key} is {self.found}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict with every field."""
        return {"code": self.code, "kind": self.kind.value, "key": self.key, "wanted": self.wanted,
                "found": self.found, "remedy": self.remedy, "unknown": self.unknown}


def reason_code(kind: Kind, key: str) -> str:
    """The stable code of a reason about ``key``: ``FIT-REQ-WEIGHT-BITS`` for the request fact ``weight.bits``."""
    return f"FIT-{kind.code}-{key.upper().replace('.', '-').replace('_', '-')}"


def _version_in(found: Any, wanted: Any) -> bool:
    try:
        return Version(found) in SpecifierSet(wanted, prereleases=True)
    except InvalidVersion:
        return False


def _listed(values: Any) -> str:
    return " ".join(str(value) for value in sorted(values, key=lambda v: (isinstance(v, str), v)))


# operator: (test of found and wanted, the sentence that says what is wanted)
_TESTS: Mapping[str, tuple[Callable[[Any, Any], bool], Callable[[str, Any], str]]] = {
    "is_in": (lambda found, wanted: found in wanted,
              lambda key, wanted: f"{key} {'in' if len(wanted) > 1 else '='} {_listed(wanted)}"),
    "at_least": (lambda found, wanted: found >= wanted, lambda key, wanted: f"{key} at least {wanted}"),
    "at_most": (lambda found, wanted: found <= wanted, lambda key, wanted: f"{key} at most {wanted}"),
    "multiple_of": (lambda found, wanted: found % wanted == 0, lambda key, wanted: f"{key} a multiple of {wanted}"),
    "has": (lambda found, wanted: wanted <= found, lambda key, wanted: f"{key} with {_listed(wanted)}"),
    "version": (_version_in, lambda key, wanted: f"{key} {wanted}"),
}


class Condition:
    """Base of the algebra; ``a & b`` and ``a | b`` combine."""

    def check(self, facts: Mapping[str, Value], registry: FactRegistry) -> tuple[Reason, ...]:
        """Every reason why ``facts`` do not meet this condition; empty when they do."""
        raise NotImplementedError

    def keys(self) -> frozenset[str]:
        """The fact keys that this condition looks at."""
        raise NotImplementedError

    def sentence(self) -> str:
        """The condition in words."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict that :func:`from_dict` reads."""
        raise NotImplementedError

    def __and__(self, other: Condition) -> Condition:
        return all_of(self, other)

    def __or__(self, other: Condition) -> Condition:
        return any_of(self, other)


@dataclass(frozen=True)
class Test(Condition):
    """One test of one fact: ``operator`` is a key of the table of tests, ``wanted`` its operand."""

    __test__ = False  # not a pytest class

    key: str
    operator: str
    wanted: Value | frozenset[int] | frozenset[str]

    def check(self, facts: Mapping[str, Value], registry: FactRegistry) -> tuple[Reason, ...]:
        found = facts.get(self.key, _MISSING)
        if found is not _MISSING and _TESTS[self.operator][0](found, self.wanted):
            return ()
        key = registry.get(self.key)
        kind = key.kind if key else Kind.REQUEST
        shown = "unknown" if found is _MISSING else (_listed(found) or "none") if isinstance(found, frozenset) else str(found)
        return (Reason(reason_code(kind, self.key), kind, self.key, self.sentence(), shown,
                       key.remedy if key else "", found is _MISSING),)

    def keys(self) -> frozenset[str]:
        return frozenset((self.key,))

    def sentence(self) -> str:
        return _TESTS[self.operator][1](self.key, self.wanted)

    def to_json(self) -> dict[str, Any]:
        return {"test": self.operator, "key": self.key, "wanted": to_json(self.wanted)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class AllOf(Condition):
    """Every part must hold; all failing parts' reasons are reported."""

    parts: tuple[Condition, ...]

    def check(self, facts: Mapping[str, Value], registry: FactRegistry) -> tuple[Reason, ...]:
        return tuple(dict.fromkeys(reason for part in self.parts for reason in part.check(facts, registry)))

    def keys(self) -> frozenset[str]:
        return frozenset().union(*(part.keys() for part in self.parts))

    def sentence(self) -> str:
        return " and ".join(_grouped(part) for part in self.parts) or "nothing"

    def to_json(self) -> dict[str, Any]:
        return {"all_of": [part.to_json() for part in self.parts]}


@dataclass(frozen=True)
class AnyOf(Condition):
    """One part must hold. When none does, the reasons of the part nearest to holding are reported.

    A part against which only missing facts stand is nearer than any that fails, since it may yet hold.
    """

    parts: tuple[Condition, ...]

    def check(self, facts: Mapping[str, Value], registry: FactRegistry) -> tuple[Reason, ...]:
        checked = [part.check(facts, registry) for part in self.parts]
        return min(checked, key=lambda reasons: (any(not reason.unknown for reason in reasons), len(reasons)))

    def keys(self) -> frozenset[str]:
        return frozenset().union(*(part.keys() for part in self.parts))

    def sentence(self) -> str:
        return " or ".join(_grouped(part) for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        return {"any_of": [part.to_json() for part in self.parts]}


def _grouped(part: Condition) -> str:
    return part.sentence() if isinstance(part, Test) else f"({part.sentence()})"


ALWAYS: Condition = AllOf(())


def is_in(key: str, values: Iterable[str | int]) -> Condition:
    """``key`` is one of ``values``."""
    wanted = frozenset(values)
    if not wanted or isinstance(values, str):
        raise ValueError(f"is_in({key!r}): wanted a non-empty collection of values, found {values!r}")
    return Test(key, "is_in", wanted)  # type: ignore[arg-type]


def equals(key: str, value: str | int) -> Condition:
    """``key`` is ``value``."""
    return is_in(key, (value,))


def at_least(key: str, value: int | float) -> Condition:
    """``key`` is a number not below ``value``. Not for architectures: a floor lets in newer parts that lack a kernel."""
    return Test(key, "at_least", value)


def at_most(key: str, value: int | float) -> Condition:
    """``key`` is a number not above ``value``."""
    return Test(key, "at_most", value)


def multiple_of(key: str, value: int) -> Condition:
    """``key`` is an integer that ``value`` (at least 1) divides."""
    if value < 1:
        raise ValueError(f"multiple_of({key!r}): wanted a divisor of at least 1, found {value!r}")
    return Test(key, "multiple_of", value)


def has(key: str, *items: str) -> Condition:
    """The set ``key`` holds all ``items`` (at least one)."""
    if not items:
        raise ValueError(f"has({key!r}): wanted at least one item, found none")
    return Test(key, "has", frozenset(items))


def version(key: str, specifier: str) -> Condition:
    """The version ``key`` is in ``specifier`` (PEP 440); pre-releases count.

    Raises:
        ValueError: ``specifier`` is not one.
    """
    try:
        SpecifierSet(specifier)
    except InvalidSpecifier as error:
        raise ValueError(f"version({key!r}): {specifier!r} is not a version specifier such as '>=2.6,<3'") from error
    return Test(key, "version", specifier)


def all_of(*parts: Condition) -> Condition:
    """Every one of ``parts`` holds; nested ones are flattened."""
    flat: list[Condition] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, AllOf) else (part,))
    return AllOf(tuple(flat))


def any_of(*parts: Condition) -> Condition:
    """At least one of ``parts`` (at least one) holds."""
    if not parts:
        raise ValueError("any_of(): wanted at least one condition, found none")
    return AnyOf(tuple(parts))


def from_dict(data: Mapping[str, Any]) -> Condition:
    """The condition that :meth:`Condition.to_json` wrote.

    Raises:
        ValueError: ``data`` is not one.
    """
    try:
        for name, combine in (("all_of", all_of), ("any_of", any_of)):
            if name in data:
                return combine(*(from_dict(part) for part in data[name]))
        operator = data["test"]
        if operator not in _MAKERS:
            raise ValueError(f"condition: unknown test {operator!r}, wanted one of {', '.join(_MAKERS)}")
        return _MAKERS[operator](data["key"], data["wanted"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"condition: {data!r} is none that to_json wrote: {type(error).__name__}: {error}") from error


_MAKERS: Mapping[str, Callable[[str, Any], Condition]] = {
    "is_in": is_in, "at_least": at_least, "at_most": at_most, "multiple_of": multiple_of,
    "has": lambda key, wanted: has(key, *wanted), "version": version,
}
