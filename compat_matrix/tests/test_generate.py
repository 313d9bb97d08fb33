"""The matrix's cells, derived from made-up platforms whose answers are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitment.conditions import ALWAYS, all_of, any_of, at_most, equals, has
from fitment.facts import Value
from fitment.features import FEATURES
from fitment.formats import formats
from fitment.kernels import GraphSafety, Kernel, Speed, sources_digest
from fitment.plugins import Registry
from fitment_matrix._site import Site
from fitment_matrix.cli._common import find
from fitment_matrix.evidence import Book, Evidence, Level, Record
from fitment_matrix.generate import Cell, Status, Survey, generate, slowness
from fitment_matrix.testing import ENGINE, all_kernels, isolate, null_platform, plugin, register

HARDWARE: dict[str, dict[str, Value]] = {
    "one": {"arch": "one", "isa": frozenset(("graphs",))}, "two": {"arch": "two", "isa": frozenset()}, "mystery": {}}
DENSE = all_of(equals("arch", "one"), equals("weight.family", "dense"))
LINEAR = [
    Kernel("linear", "toy.native", "made_up_kernels:l", DENSE, Speed.NATIVE),
    Kernel("linear", "toy.codes", "made_up_kernels:l", equals("arch", "one") & at_most("weight.bits", 4), Speed.PORTABLE),
    Kernel("linear", "toy.slow", "made_up_kernels:l", equals("arch", "two") & equals("activations", "fp32"), Speed.REFERENCE),
]


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)


def toys() -> Registry:
    """*one* computes dense weights natively and up to four bits portably, *two* by reference; of *mystery* nothing is known."""
    kernels = [*all_kernels("toy", Speed.NATIVE, without=("linear",)), *LINEAR]
    return register(plugin("toy", kernels, HARDWARE, abilities={"graph_capture": has("isa", "graphs")}))


def survey(where: str, registry: Registry | None = None, book: Book | None = None) -> Survey:
    registry = registry or toys()
    return Survey(Site(find(where, registry), registry), book or Book())


def encoding(where: str, name: str) -> Cell:
    fmt, _, word = name.partition(":")
    return survey(where).encoding(formats()[fmt], word)


@pytest.mark.parametrize(("where", "name", "status", "kernel"), [
    ("one", "safetensors:BF16", "native", "toy.native"),
    ("one", "gguf:F32", "native", "toy.native"),
    ("one", "gguf:Q4_0", "portable", "toy.codes"),
    ("one", "gguf:Q8_0", "unsupported", None),
    ("two", "gguf:Q8_0", "reference", "toy.slow"),
    ("two", "safetensors:F16", "reference", "toy.slow"),
    ("mystery", "safetensors:BF16", "unknown", None),
    ("one", "gguf:Q6_K", "unsupported", None),
])
def test_an_encoding_is_what_its_kernels_make_it(where: str, name: str, status: str, kernel: str | None) -> None:
    cell = encoding(where, name)
    assert (cell.status, cell.kernels["linear"].name if cell.kernels else None) == (Status(status), kernel)
    assert bool(cell.reasons) == (kernel is None)


def test_an_encoding_tells_under_which_activations_it_runs() -> None:
    assert encoding("two", "gguf:Q8_0").by_activations == {"fp32": Status.REFERENCE}
    assert set(encoding("one", "gguf:Q4_0").by_activations) == {"fp32", "bf16", "fp16", "int8", "fp8_e4m3fn"}
    assert encoding("one", "gguf:Q8_0").by_activations == {}


def test_a_format_is_its_worst_served_encoding_and_says_how_many_there_are() -> None:
    gguf = formats()["gguf"]
    cell = survey("one").format(gguf)
    total = len(gguf.specs) + len(gguf.recognised)
    assert (cell.status, cell.note) == (Status.PORTABLE, f"5 of {total} encodings")
    assert survey("two").format(gguf).note == f"{len(gguf.specs)} of {total} encodings"
    assert survey("mystery").format(gguf).status is Status.UNKNOWN
    assert survey("one").format(formats()["safetensors"]).status is Status.NATIVE


@pytest.mark.parametrize(("where", "feature", "status"), [
    ("one", "chunked_prefill", "native"),
    ("one", "graph_capture", "native"),
    ("two", "graph_capture", "unsupported"),
    ("one", "kv_cache.bf16", "native"),
    ("one", "kv_cache.fp16", "unsupported"),
    ("one", "lora", "unsupported"),
    ("one", "tensor_parallel", "unsupported"),
    ("one", "structured_output", "native"),
])
def test_a_feature_is_derived_from_its_needs_and_abilities(where: str, feature: str, status: str) -> None:
    cell = survey(where).feature(FEATURES[feature])
    assert cell.status is Status(status)
    assert bool(cell.reasons) == (status == "unsupported")


def test_a_feature_that_asks_nothing_of_the_hardware_says_so() -> None:
    assert survey("two").feature(FEATURES["tracing"]).note == "asks nothing of the hardware"


def test_an_ability_whose_condition_looks_at_a_missing_fact_is_unknown() -> None:
    assert survey("mystery").feature(FEATURES["graph_capture"]).status is Status.UNKNOWN


def test_graphs_need_kernels_that_can_be_captured() -> None:
    kernels = [replace(kernel, graph_safe=GraphSafety.NEVER if kernel.op == "rotary" else kernel.graph_safe)
               for kernel in all_kernels("toy")]
    registry = register(plugin("toy", kernels, {"one": {}}, abilities={"graph_capture": ALWAYS}))
    cell = survey("one", registry).feature(FEATURES["graph_capture"])
    assert [reason.code for _, reason in cell.reasons] == ["FIT-BUILD-GRAPH-SAFE"]


def test_two_missing_facts_are_unknown_and_a_wrong_one_is_unsupported() -> None:
    condition = any_of(equals("arch", "x"), equals("vendor", "y"))
    hardware: dict[str, dict[str, Value]] = {"blank": {}, "half": {"arch": "z"}, "no": {"arch": "z", "vendor": "z"}}
    registry = register(plugin("toy", all_kernels("toy", condition=condition), hardware))
    found = {name: survey(name, registry).op("linear").status for name in registry.hardware}
    assert found == {"blank": Status.UNKNOWN, "half": Status.UNKNOWN, "no": Status.UNSUPPORTED}


def test_slow_linear_layers_are_told_with_the_reason() -> None:
    registry = toys()
    site = Site(registry.hardware["two"], registry)
    slow = slowness(site, Survey(site, Book()).encoding(formats()["safetensors"], "BF16").trial)
    assert slow is not None
    assert slow.sentence() == "torch computes linear layers (toy.slow): needs arch = one; arch is two"
    assert slowness(site, None) is None
    bare = null_platform()
    site = Site(bare.devices[0], bare)
    alone = slowness(site, Survey(site, Book()).encoding(formats()["safetensors"], "BF16").trial)
    assert alone is not None
    assert alone.sentence() == "torch computes linear layers (null.reference.linear); the platform has no other kernel for them"


def test_a_cells_evidence_is_its_weakest_kernels() -> None:
    registry = null_platform()
    kernels = {kernel.op: kernel for kernel in registry.platforms["null"].kernels}
    levels = {"embedding": Level.EXECUTED, "linear": Level.COMPILED}
    seen = [Record("null", kernels[op].name, sources_digest(kernels[op]) or "", Evidence(level)) for op, level in levels.items()]
    thing = formats()["safetensors"], "BF16"
    assert survey("null", registry, Book(seen)).encoding(*thing).evidence.level is Level.COMPILED
    assert survey("null:0", registry, Book(seen)).encoding(*thing).evidence.level is Level.COMPILED, "a device of this profile"
    assert survey("null", registry, Book(seen[:1])).encoding(*thing).evidence.level is Level.DECLARED


def test_the_matrix_has_a_cell_for_everything_on_every_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, ENGINE)
    registry = toys()
    matrix = generate(registry, Book())
    things = {(cell["kind"], cell["thing"]) for cell in matrix["cells"]}
    wanted = {("format", name) for name in formats()} | {("feature", name) for name in FEATURES}
    wanted |= {("encoding", f"{fmt.name}:{word}") for fmt in formats().values() for word in fmt.specs}
    assert things == wanted
    assert len(matrix["cells"]) == len(things) * len(HARDWARE)
    assert matrix["features"]["graph_capture"]["engines"] == ["made-up"]
    assert matrix["features"]["lora"]["engines"] == []
    assert {cell["hardware"] for cell in generate(registry, Book(), platforms=())["cells"]} == set()


def test_a_partial_cell_carries_a_note_and_a_refusing_one_a_reason() -> None:
    for cell in generate(toys(), Book())["cells"]:
        if cell["status"] in ("unsupported", "unknown"):
            assert cell["reasons"], cell
            assert not cell["kernels"]
        else:
            assert cell["kernels"] or cell["note"], cell
