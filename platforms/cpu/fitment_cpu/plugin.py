"""The plugin of the CPU platform. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from fitment.conditions import ALWAYS, Condition, all_of, any_of, at_least, at_most, equals, has, is_in, multiple_of
from fitment.facts import FactKey, Kind
from fitment.hardware import Hardware, KVLayout, Listing, load_hardware
from fitment.hookspecs import hookimpl
from fitment.kernels import Kernel, Speed
from fitment.ops import WEIGHTED, reference_kernels
from fitment_cpu.detect import REBUILD, list_devices

FITMENT_API = ">=1.0,<2"
PLATFORM = "cpu"
_ORDER = ("block", "head", "slot", "dim")
_LAYOUT = KVLayout("cpu", 32, _ORDER, _ORDER, ("bf16", "fp32"))

_DTYPES = is_in("dtype", ("fp32", "bf16"))
_CACHES = is_in("kv_dtype", ("fp32", "bf16"))
_DENSE = all_of(equals("weight.family", "dense"), is_in("weight.dtype", ("fp32", "fp16", "bf16")))
_AFFINE = all_of(equals("weight.family", "group_affine"), at_least("weight.bits", 2), at_most("weight.bits", 8),
                 multiple_of("weight.group_size", 8))
_WEIGHTS = any_of(_DENSE, _AFFINE)
_ENTRIES: dict[str, dict[str, Condition]] = {
    "linear": {
        "linear_fp32": all_of(_DTYPES, equals("activations", "fp32"), _WEIGHTS),
        "linear_bf16": all_of(_DTYPES, equals("activations", "bf16"), _WEIGHTS),
        "linear_int8": all_of(_DTYPES, equals("activations", "int8"), _AFFINE),
    },
    "embedding": {"embedding": all_of(_DTYPES, _WEIGHTS)},
    "rms_norm": {"rms_norm": _DTYPES},
    "rotary": {"rotary": all_of(_DTYPES, multiple_of("rotary_size", 2))},
    "silu_mul": {"silu_mul": _DTYPES},
    "write_kv": {"write_kv": all_of(_DTYPES, _CACHES)},
    "paged_attention": {"paged_attention": all_of(
        _DTYPES, _CACHES, multiple_of("head_size", 8), at_most("head_size", 256), equals("block_size", 32))},
    "sample": {"sample": ALWAYS},
}
"""The native kernels: each op's functions, and what each requires beside a build that runs here."""

_PREPARE = "fitment_cpu.kernels.weights:prepare"
_NATIVE = ("kernels/_launch.py", "native/args.h", "native/memory.h", "native/memory.cpp", "native/pool.cpp", "native/scratch.h",
           "native/vec.h", "native/vec.inl")
_PACKED = ("kernels/weights.py", "native/linear.inl", "native/linear_int8.inl", "native/pack.h", "native/pack.cpp")
_SOURCES = {
    "linear": _PACKED,
    "embedding": _PACKED,
    "paged_attention": ("native/attention.inl", "native/attention_bf16.inl"),
    "sample": ("native/sample.inl",),
}


@hookimpl
def fitment_fact_keys() -> list[FactKey]:
    """What was built."""
    return [FactKey("cpu.native_isa", "set", Kind.BUILD, "Instruction sets for which native kernels were built and that run here.",
                    remedy=REBUILD)]


@hookimpl
def fitment_hardware() -> tuple[Hardware, ...]:
    """The parts in ``hardware.toml``."""
    return _hardware()


@cache
def _hardware() -> tuple[Hardware, ...]:
    return load_hardware(Path(__file__).with_name("hardware.toml"), PLATFORM)


@hookimpl
def fitment_devices() -> Listing:
    """The processor that this runs on."""
    return list_devices(_hardware())


@hookimpl
def fitment_kernels() -> tuple[Kernel, ...]:
    """Native kernels, their portable build, and the reference ops for where nothing was built."""
    return (*_native(Speed.NATIVE, "cpu.", "avx2"), *_native(Speed.PORTABLE, "cpu.portable.", "generic"), *_reference())


def _native(speed: Speed, prefix: str, level: str) -> Iterator[Kernel]:
    for op, entries in _ENTRIES.items():
        prepare = _PREPARE if op in WEIGHTED else None
        sources = (f"kernels/{op}.py", *_NATIVE, *_SOURCES.get(op, ("native/elementwise.inl",)))
        for name, condition in entries.items():
            yield Kernel(op, f"{prefix}{name}", f"fitment_cpu.kernels.{op}:{name}", all_of(has("cpu.native_isa", level), condition), speed,
                         prepare=prepare, sources=sources)


def _reference() -> Iterator[Kernel]:
    """Core's reference ops; those on the cache through an adapter to this layout."""
    for kernel in reference_kernels(PLATFORM, ALWAYS):
        if kernel.op in ("write_kv", "paged_attention"):
            yield replace(kernel, entry=f"fitment_cpu.kernels.reference:{kernel.op}", condition=_CACHES, sources=("kernels/reference.py",))
        elif kernel.op == "linear":
            yield replace(kernel, condition=equals("activations", "fp32"))
        else:
            yield kernel


@hookimpl
def fitment_kv_layout() -> KVLayout:
    """Each head's keys and values of a block lie together."""
    return _LAYOUT


@hookimpl
def fitment_abilities() -> dict[str, Condition]:
    """Launches of native kernels can be recorded and replayed."""
    return {"graph_capture": has("cpu.native_isa", "generic")}


@hookimpl
def fitment_defaults() -> dict[str, tuple[str, ...]]:
    """Layers pass fp32 on and multiply in bf16, whose error a small model does not notice."""
    return {"dtype": ("fp32", "bf16"), "activations": ("bf16", "fp32"), "kv_dtype": ("bf16", "fp32")}


@hookimpl
def fitment_graph_capture() -> str:
    """The capture class."""
    return "fitment_cpu.graph:CpuGraphCapture"
