"""What this machine's processor is: a thin probe, and pure functions of what it found."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from archspec.cpu import TARGETS, brand_string
from archspec.cpu.detect import detected_info

from fitment.conditions import Reason
from fitment.facts import Facts, Kind, Value
from fitment.hardware import Device, Hardware, Listing
from fitment_cpu._build import is_built, native_levels

_DTYPES = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "fphp"),
    "int8": ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"),
}
"""Element types that a processor multiplies directly, beside fp32, and the features that say so."""

_SECONDARY = ("pku", "flush_l1d", "clzero", "clwb", "cldemote", "waitpkg", "serialize", "movdir", "fsgsbase", "rd", "tsc_adjust", "sha",
              "clflushopt", "xsave", "cpuid", "evtstrm", "ssbs", "sb", "pac", "bti", "dcpop", "dit", "ecv", "dgh", "rng", "aes", "uscat",
              "lrcpc", "ilrcpc", "pmull", "crc32")
"""Beginnings of features that hypervisors hide and no kernel here uses: they do not tell one profile from another."""


@dataclass(frozen=True)
class Probe:
    """What was found on a machine; a size of 0 is not known."""

    machine: str
    vendor: str
    brand: str
    isa: frozenset[str]
    cores: int
    caches: Mapping[str, int]
    memory_bytes: int
    memory_available_bytes: int


def probe() -> Probe:
    """Look at this machine; never raises for what cannot be found."""
    info = detected_info()
    total, available = _memory()
    return Probe(platform.machine(), info.vendor, brand_string() or platform.processor() or platform.machine(),
                 frozenset(info.features), usable_cores(), _caches(Path("/sys/devices/system/cpu/cpu0/cache")), total, available)


def list_devices(profiles: Iterable[Hardware], found: Probe | None = None) -> Listing:
    """The one device, ``cpu:0``, and a reason when it has no native kernels.

    Args:
        profiles: The parts known by name, to find the one that this machine matches.
        found: What was probed; by default this machine is.
    """
    found = found or probe()
    match = closest(found, profiles)
    arch = match.facts["arch"] if match else found.machine
    family = match.facts["arch_family"] if match else found.machine
    facts = Facts({
        "arch": arch, "arch_family": family, "vendor": found.vendor, "isa": found.isa, "dtypes": dtypes(found.isa), "cores": found.cores,
        "cpu.native_isa": native_levels(found.isa), **found.caches, **_known_memory(found), **_environment(found.machine),
    })
    reasons = () if is_built() else (Reason(
        "FIT-BUILD-CPU-NATIVE", Kind.BUILD, "cpu.native_isa", "the native kernels",
        "not built: no C++ compiler was found when fitment-cpu was installed", REBUILD),)
    return Listing((Device("cpu:0", "cpu", match.name if match else "", found.brand, facts),), reasons)


REBUILD = "install a C++20 compiler (g++ 11 or newer), then: pip install --force-reinstall --no-deps fitment-cpu"


def dtypes(isa: frozenset[str]) -> frozenset[str]:
    """The element types that a processor with these features multiplies directly."""
    return frozenset(("fp32", *(dtype for dtype, features in _DTYPES.items() if isa.intersection(features))))


def closest(found: Probe, profiles: Iterable[Hardware]) -> Hardware | None:
    """The profile with the most features among those whose features (but for what hypervisors hide) this machine has.

    A maker's own part is preferred to a generic level.
    """
    best: tuple[tuple[bool, int], Hardware] | None = None
    for profile in profiles:
        isa = profile.facts["isa"]
        assert isinstance(isa, frozenset)
        target = TARGETS.get(str(profile.facts["arch"]))
        if target is None or str(target.family) != {"amd64": "x86_64", "arm64": "aarch64"}.get(found.machine, found.machine):
            continue
        if target.vendor not in ("generic", found.vendor) or not _telling(isa) <= found.isa:
            continue
        rank = (target.vendor != "generic", len(isa))
        if best is None or rank > best[0]:
            best = (rank, profile)
    return best[1] if best else None


def _telling(isa: frozenset[str]) -> frozenset[str]:
    return frozenset(feature for feature in isa if not feature.startswith(_SECONDARY))


def usable_cores() -> int:
    """Processors that this process may use: its affinity mask, cut by the cgroup's quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words(Path("/sys/fs/cgroup/cpu.max"))  # cgroup v2: "max 100000" or "200000 100000"
    if len(quota) != 2:
        quota = _words(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")) + _words(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
    if len(quota) == 2 and all(word.isdigit() for word in quota) and int(quota[1]):
        count = min(count, max(1, -(-int(quota[0]) // int(quota[1]))))
    return max(1, count)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []


def _memory() -> tuple[int, int]:
    """Bytes of memory in all and free for use, cut by the cgroup's limits; 0 where it cannot be found."""
    try:
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        total = available = 0
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            available = 1024 * int(line.split()[1])
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        words = _words(Path("/sys/fs/cgroup") / limit)
        if words and words[0].isdigit() and int(words[0]) < total:
            total = int(words[0])
            current = _words(Path("/sys/fs/cgroup") / used)
            reclaimable = sum(int(line.split()[1]) for line in _lines(Path("/sys/fs/cgroup/memory.stat"))
                              if line.startswith("inactive_file "))
            available = min(available, total - max(int(current[0]) - reclaimable, 0) if current else total)
    return total, max(available, 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _caches(folder: Path) -> dict[str, int]:
    """Cache sizes by fact key, from sysfs."""
    found = {}
    for index in sorted(folder.glob("index*")):
        level, kind, size = (" ".join(_words(index / name)) for name in ("level", "type", "size"))
        key = {("1", "Data"): "cache_l1d_bytes", ("2", "Unified"): "cache_l2_bytes", ("3", "Unified"): "cache_l3_bytes"}.get((level, kind))
        if key and size[:-1].isdigit() and size[-1] in "KM":
            found[key] = int(size[:-1]) << (10 if size[-1] == "K" else 20)
    return found


def _known_memory(found: Probe) -> dict[str, int]:
    sizes = {"memory_bytes": found.memory_bytes, "memory_available_bytes": found.memory_available_bytes}
    return {key: size for key, size in sizes.items() if size}


def _environment(machine: str) -> dict[str, Value]:
    facts: dict[str, Value] = {"python": platform.python_version(), "os": sys.platform, "machine": machine}
    with suppress(PackageNotFoundError):
        facts["torch"] = version("torch")
    with suppress(ValueError, OSError, AttributeError):  # not platform.libc_ver, which reads the whole interpreter
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        if name == "glibc":
            facts["glibc"] = number
    return facts
