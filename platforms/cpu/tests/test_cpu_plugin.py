"""The plugin: what it declares, its profiles against archspec, which kernel it gives for what, and its reference ops on its layout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from archspec.cpu import TARGETS

from fitment.facts import Kind, Value
from fitment.hardware import Hardware
from fitment.kernels import Kernel, Speed, missing_sources, select
from fitment.ops import OPS, WEIGHTED
from fitment.plugins import Registry, load
from fitment.weights.specs import DenseSpec, GroupAffineSpec, WeightSpec
from fitment_cpu import _build, detect, plugin
from fitment_cpu.kernels import reference

PACKAGE = Path(plugin.__file__).parent
KERNELS = plugin.fitment_kernels()
PROFILES = {part.name: part for part in plugin.fitment_hardware()}
Q4 = GroupAffineSpec(4, 32, "minimums")
OPEN = ("dtype", "activations", "kv_dtype")


@pytest.fixture(scope="module")
def registry() -> Registry:
    """The registry with this plugin in it, installed or not."""
    return load({"cpu": "fitment_cpu.plugin"})


def chosen(registry: Registry, hardware: str, op: str, **request: Value) -> str:
    """The kernel for a call on a profile; "" when none is admitted. Underscores of ``weight_bits`` stand for dots."""
    call = {key.replace("weight_", "weight."): value for key, value in request.items()}
    found = select(op, PROFILES[hardware].facts | call, KERNELS, registry.facts)
    return found.chosen.name if found.chosen else ""


def linear(registry: Registry, hardware: str, spec: WeightSpec, activations: str, dtype: str = "fp32") -> str:
    """The kernel of a linear layer."""
    call: Mapping[str, Value] = spec.facts() | {"dtype": dtype, "activations": activations}
    found = select("linear", PROFILES[hardware].facts | call, KERNELS, registry.facts)
    return found.chosen.name if found.chosen else ""


def test_it_loads(registry: Registry) -> None:
    assert not [broken for broken in registry.broken if broken.name == "cpu"]
    platform = registry.platforms["cpu"]
    assert platform.kv_layout.block_size == 32
    assert platform.kv_layout.k_order == platform.kv_layout.v_order == ("block", "head", "slot", "dim")
    assert [device.id for device in platform.listing.devices] == ["cpu:0"]
    assert platform.defaults["kv_dtype"] == ("bf16", "fp32")


def test_describing_imports_no_torch() -> None:
    code = ("import sys\nfrom fitment_cpu import plugin\nplugin.fitment_kernels(); plugin.fitment_hardware(); plugin.fitment_devices()\n"
            "wrong = {'torch', 'numpy', 'fitment_cpu._native'} & set(sys.modules)\nassert not wrong, wrong")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_op_has_a_kernel_of_every_speed() -> None:
    for speed in Speed:
        assert {kernel.op for kernel in KERNELS if kernel.speed is speed} == set(OPS)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_entries_are_there(kernel: Kernel) -> None:
    if "reference" not in kernel.name:
        pytest.importorskip("fitment_cpu._native", reason="fitment-cpu was installed without its extension")
    assert callable(kernel.load())
    assert callable(kernel.load_prepare())
    assert (kernel.prepare is not None) == (kernel.op in WEIGHTED and "reference" not in kernel.name)


def test_sources_are_there_and_every_native_file_dates_some_kernel() -> None:
    assert {kernel.name: missing_sources(kernel) for kernel in KERNELS if missing_sources(kernel)} == {}
    dated = {source for kernel in KERNELS for source in kernel.sources if source.startswith("native/")}
    glue = {f"native/{name}" for name in ("bindings.cpp", "dispatch.cpp", "dispatch.h", "isa.inl", "pool.h")}
    levels = {f"native/isa_{level}.cpp" for level in _build.LEVELS}
    assert {f"native/{path.name}" for path in (PACKAGE / "native").iterdir()} == dated | glue | levels


# Profiles


@pytest.mark.parametrize("part", PROFILES.values(), ids=lambda part: part.name)
def test_a_profile_is_what_archspec_says(part: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_build.ISA_VARIABLE, raising=False)
    target, facts = TARGETS[str(part.facts["arch"])], part.facts
    isa = frozenset(target.features)
    assert part.source == f"archspec: {target.name}"
    assert facts["isa"] == isa
    assert facts["vendor"] == target.vendor
    assert facts["arch_family"] == facts["machine"] == str(target.family)
    assert facts["dtypes"] == detect.dtypes(isa)
    assert facts["cpu.native_isa"] == _build.levels(isa)


def test_a_profile_does_not_depend_on_this_machine() -> None:
    part = PROFILES["neoverse-v2"]
    assert "memory_available_bytes" not in part.facts
    assert "torch" not in part.facts
    assert part.facts["memory_bytes"] == 64 << 30


# Which kernel for what


@pytest.mark.parametrize(("hardware", "activations", "spec", "kernel"), [
    ("zen4", "fp32", Q4, "cpu.linear_fp32"),
    ("zen4", "bf16", Q4, "cpu.linear_bf16"),
    ("zen4", "int8", Q4, "cpu.linear_int8"),
    ("zen4", "bf16", DenseSpec("fp16"), "cpu.linear_bf16"),
    ("zen4", "int8", DenseSpec("bf16"), ""),  # nothing to multiply int8 with
    ("zen4", "fp16", Q4, ""),
    ("haswell", "int8", Q4, "cpu.linear_int8"),
    ("x86-64-v2", "bf16", Q4, "cpu.portable.linear_bf16"),
    ("neoverse-v2", "int8", Q4, "cpu.portable.linear_int8"),
    ("zen4", "fp32", GroupAffineSpec(2, 16, "zero_points"), "cpu.linear_fp32"),
    ("zen4", "fp32", GroupAffineSpec(8, 0, "constant", "fp32"), "cpu.linear_fp32"),  # a group is a whole row
    ("zen4", "bf16", GroupAffineSpec(4, 12, "constant"), ""),
    ("zen4", "fp32", GroupAffineSpec(4, 12, "constant"), "cpu.reference.linear"),
])
def test_linear(registry: Registry, hardware: str, activations: str, spec: WeightSpec, kernel: str) -> None:
    assert linear(registry, hardware, spec, activations) == kernel


@pytest.mark.parametrize(("facts", "kernel"), [
    ({}, "cpu.paged_attention"),
    ({"kv_dtype": "fp32", "head_size": 256}, "cpu.paged_attention"),
    ({"head_size": 264}, "cpu.reference.paged_attention"),
    ({"head_size": 60}, "cpu.reference.paged_attention"),
    ({"block_size": 16}, "cpu.reference.paged_attention"),
    ({"dtype": "fp16"}, "cpu.reference.paged_attention"),
    ({"kv_dtype": "fp16"}, ""),
    ({"kv_dtype": "fp8_e4m3fn"}, ""),
])
def test_attention(registry: Registry, facts: dict[str, Value], kernel: str) -> None:
    call: dict[str, Value] = {"dtype": "bf16", "kv_dtype": "bf16", "head_size": 64, "block_size": 32, **facts}
    assert chosen(registry, "zen4", "paged_attention", **call) == kernel


def test_elementwise(registry: Registry) -> None:
    assert chosen(registry, "zen4", "rotary", dtype="bf16", rotary_size=64) == "cpu.rotary"
    assert chosen(registry, "zen4", "rotary", dtype="bf16", rotary_size=63) == "cpu.reference.rotary"
    assert chosen(registry, "haswell", "rms_norm", dtype="fp32") == "cpu.rms_norm"
    assert chosen(registry, "neoverse-n1", "silu_mul", dtype="fp32") == "cpu.portable.silu_mul"
    assert chosen(registry, "zen4", "write_kv", dtype="fp32", kv_dtype="bf16") == "cpu.write_kv"
    assert chosen(registry, "zen4", "sample") == "cpu.sample"
    assert chosen(registry, "zen4", "embedding", dtype="bf16", weight_family="dense", weight_dtype="fp32") == "cpu.embedding"


def test_where_nothing_was_built_the_reference_serves_and_the_reason_has_a_remedy(registry: Registry) -> None:
    facts = PROFILES["zen4"].facts | {"cpu.native_isa": frozenset(), "dtype": "fp32", "kv_dtype": "fp32", "head_size": 64, "block_size": 32,
                                      "activations": "fp32", "rotary_size": 64, **Q4.facts()}
    for op in OPS:
        found = select(op, facts, KERNELS, registry.facts)
        assert found.chosen is not None
        assert found.chosen.name == f"cpu.reference.{op}"
        reasons = {reason for verdict in found.trace for reason in verdict.reasons if reason.key == "cpu.native_isa"}
        assert {reason.code for reason in reasons} == {"FIT-BUILD-CPU-NATIVE-ISA"}
        assert all(reason.remedy.startswith("install a C++20 compiler") for reason in reasons)
    abilities = plugin.fitment_abilities()
    assert [reason.key for reason in abilities["graph_capture"].check(facts, registry.facts)] == ["cpu.native_isa"]
    assert abilities["graph_capture"].check(PROFILES["neoverse-n1"].facts, registry.facts) == ()


def test_the_first_default_is_served_by_every_profile(registry: Registry) -> None:
    defaults = plugin.fitment_defaults()
    dtype, activations, kv_dtype = (defaults[key][0] for key in OPEN)
    for name in PROFILES:
        assert "reference" not in linear(registry, name, Q4, activations, dtype)
        assert chosen(registry, name, "paged_attention", dtype=dtype, kv_dtype=kv_dtype, head_size=64, block_size=32).endswith(
            "paged_attention")
    assert set(defaults["kv_dtype"]) == set(plugin.fitment_kv_layout().dtypes)


# The reference ops on this layout


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_reference_cache_writes(cache_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    blocks, heads, slots, size = 3, 2, 32, 8
    k_cache, v_cache = (torch.full((blocks, heads, slots, size), 7.0, dtype=cache_dtype) for _ in range(2))
    k, v = (torch.randn(6, heads, size, generator=generator) for _ in range(2))
    slot_mapping = torch.tensor([0, 33, -1, 95, 96, 31], dtype=torch.int32)  # the third is padding, the fifth beyond the cache
    reference.write_kv(k, v, k_cache, v_cache, slot_mapping)
    for values, cache in ((k, k_cache), (v, v_cache)):
        for token, (block, slot) in {0: (0, 0), 1: (1, 1), 3: (2, 31), 5: (0, 31)}.items():
            assert torch.equal(cache[block, :, slot], values[token].to(cache_dtype))
        assert int((cache == 7).all(-1).sum()) == heads * (blocks * slots - 4)


def test_reference_attention_reads_what_was_written() -> None:
    rng = np.random.default_rng(5)
    heads, kv_heads, size, slots = 4, 2, 16, 32
    k_cache, v_cache = (torch.full((5, kv_heads, slots, size), torch.nan) for _ in range(2))
    block_table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    lengths, queries = [40, 7], [3, 1]
    out = torch.empty(sum(queries), heads, size)
    q = rng.standard_normal((sum(queries), heads, size))
    wanted, row = np.empty_like(q), 0
    for s, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        k, v = rng.standard_normal((2, length, kv_heads, size)).astype(np.float32)
        places = [int(block_table[s, i // slots]) * slots + i % slots for i in range(length)]
        reference.write_kv(torch.from_numpy(k), torch.from_numpy(v), k_cache, v_cache, torch.tensor(places, dtype=torch.int32))
        for j in range(count):
            seen = length - count + j + 1
            for h in range(heads):
                scores = k[:seen, h // 2].astype(np.float64) @ q[row, h] * 0.25
                weights = np.exp(scores - scores.max())
                wanted[row, h] = weights / weights.sum() @ v[:seen, h // 2].astype(np.float64)
            row += 1
    reference.paged_attention(torch.from_numpy(q).float(), k_cache, v_cache, block_table, torch.tensor([0, 3, 4], dtype=torch.int32),
                              torch.tensor(lengths, dtype=torch.int32), 0.25, out)
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_a_profile_says_nothing_of_the_request(registry: Registry) -> None:
    assert not {key for part in PROFILES.values() for key in part.facts if registry.facts[key].kind is Kind.REQUEST}
