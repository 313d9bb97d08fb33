"""Features: what they need is declared, what does not combine is told, and support follows from the kernels that are there."""

from __future__ import annotations

from itertools import permutations

import pytest

from fitment.conditions import all_of, at_most, equals, is_in
from fitment.facts import FactRegistry, Kind, Value
from fitment.features import ABILITIES, FEATURES, conflicts
from fitment.kernels import Kernel, select
from fitment.null import plugin
from fitment.ops import OPS

REGISTRY = FactRegistry()
PLANNED_OPS = {"lora", "cross_attention", "encoder_attention"}


def test_names_and_sentences() -> None:
    assert all(name == feature.name for name, feature in FEATURES.items())
    assert [name for name, feature in FEATURES.items() if not feature.doc.endswith(".")] == []
    assert all(ABILITIES.values())


def test_what_a_feature_needs_is_declared() -> None:
    for feature in FEATURES.values():
        assert set(feature.abilities) <= set(ABILITIES)
        assert set(feature.conflicts) <= set(FEATURES)
        assert all(feature.conflicts.values())
        for need in feature.needs:
            assert need.op in (*OPS, *PLANNED_OPS)
            assert need.label
            assert REGISTRY.problems(need.facts) == []
            assert {REGISTRY[key].kind for key in need.facts} <= {Kind.REQUEST}


def test_an_op_that_has_come_is_planned_no_more() -> None:
    assert not PLANNED_OPS & set(OPS)


def test_features_that_do_not_combine() -> None:
    why = "drafted tokens are verified in one batch, which this cannot follow"
    assert conflicts(("speculative.ngram", "beam_search")) == [f"speculative.ngram does not combine with beam_search: {why}"]
    for order in permutations(("beam_search", "chunked_prefill", "multi_step", "speculative.ngram")):
        found = conflicts(order)
        assert len(found) == 2
        assert {frozenset(sentence.partition(":")[0].split(" does not combine with ")) for sentence in found} == {
            frozenset(("speculative.ngram", "beam_search")), frozenset(("multi_step", "chunked_prefill"))}


@pytest.mark.parametrize("names", [(), ("beam_search",), ("chunked_prefill", "prefix_caching", "graph_capture", "logprobs")])
def test_features_that_combine(names: tuple[str, ...]) -> None:
    assert conflicts(names) == []


@pytest.mark.parametrize(("feature", "is_served"), [
    ("continuous_batching", True),  # one query token
    ("chunked_prefill", False),  # 512
    ("speculative.ngram", True),  # 8
    ("kv_cache.bf16", True),
    ("kv_cache.fp8_e4m3fn", False),
    ("kv_cache.fp16", False),  # attention has it, the cache write has not
    ("sampling", False),
    ("encoder_decoder", False),
    ("logprobs", True),  # needs nothing
])
def test_support_follows_from_the_kernels(feature: str, is_served: bool) -> None:
    kernels = [
        Kernel("paged_attention", "toy.decode", "toy:decode", all_of(at_most("query_length", 8), is_in("kv_dtype", ("bf16", "fp16")))),
        Kernel("write_kv", "toy.write", "toy:write", equals("kv_dtype", "bf16")),
    ]
    assumed: dict[str, Value] = {"query_length": 1, "kv_dtype": "bf16"}
    selections = [select(need.op, {**assumed, **need.facts}, kernels, REGISTRY) for need in FEATURES[feature].needs]
    assert all(selection.chosen is not None for selection in selections) == is_served
    assert all(selection.reasons for selection in selections if selection.chosen is None)


def test_the_null_platform_serves_what_its_ops_give() -> None:
    kernels, profiles = plugin.fitment_kernels(), {part.name: part.facts for part in plugin.fitment_hardware()}

    def served(hardware: str) -> set[str]:
        return {name for name, feature in FEATURES.items() if feature.needs and all(
            select(need.op, profiles[hardware] | need.facts, kernels, REGISTRY).chosen for need in feature.needs)}

    assert {"continuous_batching", "chunked_prefill", "kv_cache.fp32", "sampling", "speculative.ngram"} <= served("null")
    assert not {"lora", "encoder_decoder", "multimodal.image"} & served("null")
    assert served("null-2") == set()
