"""Facts, their declarations, and the registry of declarations."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitment.errors import FitmentError, Problems
from fitment.facts import CORE_KEYS, FactKey, FactRegistry, Facts, Kind, Value, from_json, to_json

VALUES = st.one_of(st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False), st.frozensets(st.text(max_size=5), max_size=4))


def key(name: str = "acme.rows", type_: str = "int") -> FactKey:
    return FactKey(name, type_, Kind.HARDWARE, "Rows.")


@pytest.mark.parametrize(("type_", "right", "wrong"), [
    ("str", ["", "sm_90"], [1, None, frozenset()]),
    ("int", [0, -3], [True, 1.0, "1", None]),
    ("float", [0.5, 2], [False, "2"]),
    ("bool", [True, False], [0, 1, "true"]),
    ("set", [frozenset(), frozenset(("avx2",))], [{"avx2"}, ["avx2"], "avx2", frozenset((1,))]),
    ("version", ["2.6"], [2.6, None]),
])
def test_a_key_accepts_its_type_alone(type_: str, right: list[object], wrong: list[object]) -> None:
    assert [value for value in right if not key(type_=type_).accepts(value)] == []
    assert [value for value in wrong if key(type_=type_).accepts(value)] == []


def test_facts_are_an_immutable_mapping() -> None:
    source: dict[str, Value] = {"arch": "zen4", "cores": 2}
    facts = Facts(source)
    source["arch"] = "zen5"
    assert facts["arch"] == "zen4"
    assert facts == {"cores": 2, "arch": "zen4"}
    assert facts != {"arch": "zen4"}
    assert list(facts) == ["arch", "cores"]
    assert len(facts) == 2
    assert "isa" not in facts
    with pytest.raises(TypeError):
        facts["arch"] = "zen5"  # type: ignore[index]
    assert repr(Facts({"a": 1})) == "Facts({'a': 1})"
    assert Facts() == {}


def test_the_right_side_wins() -> None:
    left = Facts({"dtype": "fp32", "arch": "zen4"})
    joined = left | {"dtype": "bf16", "cores": 4}
    assert joined == {"dtype": "bf16", "arch": "zen4", "cores": 4}
    assert isinstance(joined, Facts)
    assert left["dtype"] == "fp32"


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
@settings(max_examples=60)
def test_equal_facts_have_equal_hashes(items: dict[str, Value]) -> None:
    facts, reverse = Facts(items), Facts(dict(reversed(items.items())))
    assert facts == reverse
    assert hash(facts) == hash(reverse)
    assert len({facts, reverse}) == 1


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
@settings(max_examples=60)
def test_json_keeps_every_value(items: dict[str, Value]) -> None:
    written = Facts(items).to_json()
    assert list(written) == sorted(items)
    read = json.loads(json.dumps(written))
    assert {name: from_json(value) for name, value in read.items()} == items


def test_a_set_is_a_sorted_list_in_json() -> None:
    assert to_json(frozenset(("b", "a", "c"))) == ["a", "b", "c"]
    assert from_json(["a", "b"]) == frozenset(("a", "b"))
    assert from_json("a") == to_json("a") == "a"


def test_core_declares_each_key_once_with_a_sentence() -> None:
    names = [declared.name for declared in CORE_KEYS]
    assert len(names) == len(set(names))
    assert [declared.name for declared in CORE_KEYS if not declared.doc.endswith(".")] == []
    assert not [declared.name for declared in CORE_KEYS if declared.kind in (Kind.ENVIRONMENT, Kind.BUILD) and not declared.remedy]
    assert {declared.name for declared in FactRegistry()} == set(names)


def test_what_a_plugin_declares_is_found() -> None:
    registry = FactRegistry()
    registry.declare([key()], owner="acme")
    assert "acme.rows" in registry
    assert registry["acme.rows"] == registry.get("acme.rows") == key()
    assert registry.get("acme.columns") is None
    assert "acme.columns" not in registry
    with pytest.raises(KeyError):
        registry["acme.columns"]


def test_every_wrong_declaration_is_told_at_once_and_none_added() -> None:
    registry = FactRegistry()
    wrong = [key("arch"), key("acmerows"), key("other.rows"), key("acme.rows", "integer"), key("acme.ok"), key("acme.ok")]
    with pytest.raises(Problems) as caught:
        registry.declare(wrong, owner="acme")
    assert caught.value.problems == (
        "fact key 'arch': a plugin declares keys under its own prefix, 'acme.'",
        "fact key 'arch' is declared already: The architecture that kernels are compiled for, as its toolchain names it.",
        "fact key 'acmerows': a plugin declares keys under its own prefix, 'acme.'",
        "fact key 'other.rows': a plugin declares keys under its own prefix, 'acme.'",
        "fact key 'acme.rows': type 'integer' is none of str, int, float, bool, set, version",
        "fact key 'acme.ok' is declared already: Rows.",
    )
    assert str(caught.value).startswith("fact keys of acme: 6 problems\n  fact key 'arch': ")
    assert {declared.name for declared in registry} == {declared.name for declared in CORE_KEYS}


def test_keys_can_come_from_a_generator() -> None:
    registry = FactRegistry(key(name) for name in ("acme.a", "acme.b"))
    assert {"acme.a", "acme.b"} <= {declared.name for declared in registry}


def test_facts_are_checked_against_the_declarations() -> None:
    registry = FactRegistry([key()])
    assert registry.problems(Facts({"acme.rows": 4, "arch": "zen4", "isa": frozenset(("avx2",)), "memory_bandwidth": 1})) == []
    assert registry.problems({"acme.rows": "4", "arhc": "zen4", "isa": ["avx2"], "cores": True}) == [
        "fact 'acme.rows' = '4' has type str, wanted int",
        "fact 'arhc' is not declared; declare a FactKey for it or use a declared one",
        "fact 'isa' = ['avx2'] has type list, wanted set",
        "fact 'cores' = True has type bool, wanted int",
    ]


def test_problems_are_one_error_that_counts() -> None:
    one = Problems("hardware.toml", ["a title is missing"])
    assert str(one) == "hardware.toml: 1 problem\n  a title is missing"
    assert isinstance(one, FitmentError)
    assert one.problems == ("a title is missing",)
    assert one.subject == "hardware.toml"
