"""The algebra of conditions against truth tables: yes, no, and unknown where a fact is missing."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitment.conditions import (
    ALWAYS,
    AllOf,
    AnyOf,
    Condition,
    Reason,
    Test,
    all_of,
    any_of,
    at_least,
    at_most,
    equals,
    from_dict,
    has,
    is_in,
    multiple_of,
    reason_code,
    version,
)
from fitment.facts import FactKey, FactRegistry, Kind, Value

REGISTRY = FactRegistry([FactKey("acme.tile_rows", "int", Kind.BUILD, "Rows of a tile.", remedy="rebuild")])


def state(condition: Condition, facts: dict[str, Value]) -> str:
    """"yes", "no", or "unknown" when only missing facts stand against it."""
    reasons = condition.check(facts, REGISTRY)
    if not reasons:
        return "yes"
    return "unknown" if all(reason.unknown for reason in reasons) else "no"


@pytest.mark.parametrize(("condition", "met", "unmet", "words"), [
    (is_in("arch", ("sm_90", "sm_80")), ["sm_80", "sm_90"], ["sm_100", "sm_9", ""], "arch in sm_80 sm_90"),
    (equals("arch", "zen4"), ["zen4"], ["zen5"], "arch = zen4"),
    (is_in("head_size", (128, 64)), [64, 128], [96, 0], "head_size in 64 128"),
    (at_least("cores", 8), [8, 9, 1 << 40], [7, 0, -1], "cores at least 8"),
    (at_least("memory_bandwidth", 1.5e9), [1.5e9, 2e9], [1.4e9], "memory_bandwidth at least 1500000000.0"),
    (at_most("head_size", 256), [256, 1, 0], [257], "head_size at most 256"),
    (multiple_of("weight.group_size", 8), [0, 8, 128], [1, 4, 12], "weight.group_size a multiple of 8"),
    (has("isa", "avx2", "fma"), [frozenset(("fma", "avx2")), frozenset(("fma", "avx2", "sse"))],
     [frozenset(), frozenset(("avx2",)), frozenset(("avx512f",))], "isa with avx2 fma"),
    (version("torch", ">=2.6,<3"), ["2.6", "2.13.0+cpu", "2.6.0", "2.7.0rc1"], ["2.5.9", "3.0", "2.6.0a0", "nightly"], "torch >=2.6,<3"),
    (version("glibc", ""), ["2.17", "1.0a1"], ["musl"], "glibc "),
])
def test_a_test_holds_fails_or_is_unknown(condition: Condition, met: list[Value], unmet: list[Value], words: str) -> None:
    (name,) = condition.keys()
    assert [value for value in met if condition.check({name: value}, REGISTRY)] == []
    assert condition.sentence() == words
    for value in unmet:
        (reason,) = condition.check({name: value}, REGISTRY)
        assert not reason.unknown
        assert (reason.key, reason.wanted, reason.kind) == (name, words, REGISTRY[name].kind)
    (reason,) = condition.check({"vendor": "nobody"}, REGISTRY)
    assert reason.unknown
    assert reason.found == "unknown"
    assert reason.code == condition.check({name: unmet[0]}, REGISTRY)[0].code


YES, NO, UNKNOWN = equals("arch", "zen4"), equals("vendor", "AuthenticAMD"), equals("os", "linux")
FACTS: dict[str, Value] = {"arch": "zen4", "vendor": "GenuineIntel"}
STATES = {"yes": YES, "no": NO, "unknown": UNKNOWN}
AND = {("yes", "yes"): "yes", ("yes", "no"): "no", ("yes", "unknown"): "unknown", ("no", "no"): "no", ("no", "unknown"): "no",
       ("unknown", "unknown"): "unknown"}
OR = {("yes", "yes"): "yes", ("yes", "no"): "yes", ("yes", "unknown"): "yes", ("no", "no"): "no", ("no", "unknown"): "unknown",
      ("unknown", "unknown"): "unknown"}


@pytest.mark.parametrize(("a", "b"), list(product(STATES, STATES)))
def test_combinations_follow_three_valued_logic(a: str, b: str) -> None:
    """Kleene's strong logic, in which *unknown* may be either."""
    left, right = STATES[a], STATES[b]
    assert state(all_of(left, right), FACTS) == state(left & right, FACTS) == (AND.get((a, b)) or AND[b, a])
    assert state(any_of(left, right), FACTS) == state(left | right, FACTS) == (OR.get((a, b)) or OR[b, a])


LEAVES = st.sampled_from(sorted(STATES))
TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.tuples(st.sampled_from(("all", "any")), st.lists(inner, min_size=1, max_size=3)), max_leaves=8)
ORDER = {"no": 0, "unknown": 1, "yes": 2}


def build(tree: Any) -> tuple[Condition, str]:
    """The condition of a tree, and its state by minimum and maximum."""
    if isinstance(tree, str):
        return STATES[tree], tree
    parts, states = zip(*(build(part) for part in tree[1]), strict=True)
    if tree[0] == "all":
        return all_of(*parts), min(states, key=ORDER.__getitem__)
    return any_of(*parts), max(states, key=ORDER.__getitem__)


@given(TREES)
@settings(max_examples=150)
def test_every_nesting_follows_three_valued_logic(tree: Any) -> None:
    condition, wanted = build(tree)
    assert state(condition, FACTS) == wanted
    assert state(from_dict(json.loads(json.dumps(condition.to_json()))), FACTS) == wanted


def test_all_of_reports_every_reason_once() -> None:
    condition = all_of(at_least("cores", 8), equals("arch", "zen5"), all_of(at_least("cores", 8), has("isa", "amx_int8")))
    found = condition.check({"arch": "zen4", "cores": 4, "isa": frozenset()}, REGISTRY)
    assert [reason.code for reason in found] == ["FIT-HW-CORES", "FIT-HW-ARCH", "FIT-HW-ISA"]
    assert isinstance(condition, AllOf)
    assert len(condition.parts) == 4  # flat
    assert ALWAYS.check({}, REGISTRY) == ()


def test_any_of_reports_the_part_nearest_to_holding() -> None:
    dense = all_of(equals("weight.family", "dense"), is_in("weight.dtype", ("fp16", "bf16")))
    affine = all_of(equals("weight.family", "group_affine"), at_most("weight.bits", 4), multiple_of("weight.group_size", 32))
    facts: dict[str, Value] = {"weight.family": "group_affine", "weight.bits": 8, "weight.group_size": 32}
    found = any_of(dense, affine).check(facts, REGISTRY)
    assert [reason.sentence() for reason in found] == ["needs weight.bits at most 4; weight.bits is 8"]


def test_any_of_prefers_a_part_that_may_yet_hold() -> None:
    may = all_of(equals("os", "linux"), version("driver", ">=535"))
    assert [reason.unknown for reason in any_of(NO, may).check(FACTS, REGISTRY)] == [True, True]
    assert [reason.unknown for reason in any_of(may, NO).check(FACTS, REGISTRY)] == [True, True]


def test_a_reason_says_what_where_and_what_to_do() -> None:
    (reason,) = at_least("acme.tile_rows", 16).check({"acme.tile_rows": 8}, REGISTRY)
    assert reason == Reason("FIT-BUILD-ACME-TILE-ROWS", Kind.BUILD, "acme.tile_rows", "acme.tile_rows at least 16", "8", "rebuild", False)
    assert reason.sentence() == "needs acme.tile_rows at least 16; acme.tile_rows is 8"
    assert reason.to_json() == {"code": "FIT-BUILD-ACME-TILE-ROWS", "kind": "build", "key": "acme.tile_rows",
                                "wanted": "acme.tile_rows at least 16", "found": "8", "remedy": "rebuild", "unknown": False}


@pytest.mark.parametrize(("facts", "found"), [
    ({"isa": frozenset()}, "none"),
    ({"isa": frozenset(("sse2", "fma"))}, "fma sse2"),
    ({}, "unknown"),
])
def test_a_set_is_shown_sorted(facts: dict[str, Value], found: str) -> None:
    (reason,) = has("isa", "avx2").check(facts, REGISTRY)
    assert reason.found == found


def test_a_key_that_nobody_declared_is_the_requests() -> None:
    (reason,) = equals("nobody.knows", 1).check({}, REGISTRY)
    assert (reason.code, reason.kind, reason.remedy) == ("FIT-REQ-NOBODY-KNOWS", Kind.REQUEST, "")


@pytest.mark.parametrize(("kind", "key", "code"), [
    (Kind.HARDWARE, "arch", "FIT-HW-ARCH"),
    (Kind.BUILD, "cpu.native_isa", "FIT-BUILD-CPU-NATIVE-ISA"),
    (Kind.ENVIRONMENT, "torch", "FIT-ENV-TORCH"),
    (Kind.REQUEST, "weight.group_size", "FIT-REQ-WEIGHT-GROUP-SIZE"),
])
def test_codes_are_stable(kind: Kind, key: str, code: str) -> None:
    assert reason_code(kind, key) == code


@pytest.mark.parametrize(("condition", "words"), [
    (ALWAYS, "nothing"),
    (all_of(YES), "arch = zen4"),
    (YES & NO, "arch = zen4 and vendor = AuthenticAMD"),
    (YES | NO, "arch = zen4 or vendor = AuthenticAMD"),
    (YES & (NO | UNKNOWN), "arch = zen4 and (vendor = AuthenticAMD or os = linux)"),
    ((YES & NO) | UNKNOWN, "(arch = zen4 and vendor = AuthenticAMD) or os = linux"),
])
def test_sentences(condition: Condition, words: str) -> None:
    assert condition.sentence() == words


def test_keys_are_those_of_all_parts() -> None:
    assert (YES & (NO | UNKNOWN)).keys() == {"arch", "vendor", "os"}
    assert ALWAYS.keys() == frozenset()


@pytest.mark.parametrize(("condition", "data"), [
    (is_in("head_size", (64, 128)), {"test": "is_in", "key": "head_size", "wanted": [64, 128]}),
    (is_in("arch", {"zen4"}), {"test": "is_in", "key": "arch", "wanted": ["zen4"]}),
    (at_least("cores", 2), {"test": "at_least", "key": "cores", "wanted": 2}),
    (at_most("memory_bandwidth", 1.5), {"test": "at_most", "key": "memory_bandwidth", "wanted": 1.5}),
    (multiple_of("head_size", 8), {"test": "multiple_of", "key": "head_size", "wanted": 8}),
    (has("isa", "fma", "avx2"), {"test": "has", "key": "isa", "wanted": ["avx2", "fma"]}),
    (version("torch", ">=2.6"), {"test": "version", "key": "torch", "wanted": ">=2.6"}),
    (ALWAYS, {"all_of": []}),
    (any_of(YES, all_of(NO, UNKNOWN)), {"any_of": [{"test": "is_in", "key": "arch", "wanted": ["zen4"]}, {"all_of": [
        {"test": "is_in", "key": "vendor", "wanted": ["AuthenticAMD"]}, {"test": "is_in", "key": "os", "wanted": ["linux"]}]}]}),
])
def test_conditions_survive_json(condition: Condition, data: dict[str, Any]) -> None:
    assert condition.to_json() == data
    assert from_dict(json.loads(json.dumps(data))) == condition
    assert hash(from_dict(data)) == hash(condition)


@pytest.mark.parametrize(("data", "words"), [
    ({"test": "equal", "key": "arch", "wanted": "zen4"}, "unknown test 'equal', wanted one of is_in, at_least, "),
    ({"key": "arch"}, "none that to_json wrote: KeyError: 'test'"),
    ({"test": "has", "key": "isa"}, "none that to_json wrote: KeyError: 'wanted'"),
    ({"all_of": [{"test": "is_in", "key": "arch", "wanted": []}]}, "wanted a non-empty collection"),
    ({"all_of": 3}, "none that to_json wrote: TypeError"),
    ({"any_of": []}, "wanted at least one condition"),
    ({"test": "multiple_of", "key": "head_size", "wanted": 0}, "wanted a divisor of at least 1, found 0"),
    ([], "none that to_json wrote"),
])
def test_what_is_no_condition_is_refused(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_dict(data)


def test_senseless_conditions_are_refused_where_they_are_made() -> None:
    with pytest.raises(ValueError, match=r"is_in\('arch'\): wanted a non-empty collection of values, found \[\]"):
        is_in("arch", [])
    with pytest.raises(ValueError, match=r"is_in\('arch'\): .* found 'zen4'"):
        is_in("arch", "zen4")
    with pytest.raises(ValueError, match=r"multiple_of\('head_size'\): .* found -8"):
        multiple_of("head_size", -8)
    with pytest.raises(ValueError, match=r"version\('torch'\): '2.6 or newer' is not a version specifier"):
        version("torch", "2.6 or newer")
    with pytest.raises(ValueError, match=r"has\('isa'\): wanted at least one item"):
        has("isa")
    with pytest.raises(ValueError, match="any_of"):
        any_of()


def test_conditions_are_values() -> None:
    assert len({equals("arch", "zen4"), is_in("arch", ("zen4",)), Test("arch", "is_in", frozenset(("zen4",)))}) == 1
    assert any_of(YES) == AnyOf((YES,))
    assert any_of(YES, NO) != any_of(NO, YES)
