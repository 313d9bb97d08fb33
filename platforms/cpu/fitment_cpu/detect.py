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

ROOT = Path("/")

_FAMILIES = {"AMD64": "x86_64", "ARM64": "aarch64", "arm64": "aarch64"}
"""Where a system's name of the processor's family is not archspec's."""

_DTYPES = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "fphp"),
    "int8": ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"),
}
"""Element types that a processor multiplies directly, beside fp32, and the features that say so."""

_SECONDARY = ("pku", "flush_l1d", "clzero", "cldemote", "waitpkg", "serialize", "movdir", "fsgsbase", "rd", "tsc_adjust", "sha",
              "clflushopt", "xsave", "cpuid", "evtstrm", "ssbs", "sb", "pac", "bti", "dcpop", "dit", "ecv", "dgh", "rng", "aes", "uscat",
              "lrcpc", "ilrcpc", "pmull", "crc32")
"""Beginnings of features that hypervisors hide and no kernel here uses: they do not tell one profile from another."""


@dataclass(frozen=True)
class Probe:
    """What was found on a machine; a size of 0 is not known, nor is an empty name.

    ``isa`` and ``vendor`` are archspec's; ``part`` is Arm's number of the core's design, which tells cores of one feature set apart.
    """

    machine: str
    vendor: str
    part: str
    brand: str
    isa: frozenset[str]
    cores: int
    caches: Mapping[str, int]
    memory_bytes: int
    memory_available_bytes: int


def probe(root: Path = ROOT) -> Probe:
    """Look at this machine, whose /proc and /sys lie under ``root``; never raises for what cannot be found."""
    info = detected_info()
    isa = info.features or (TARGETS[info.name].features if info.name in TARGETS else ())  # macOS tells the model alone
    brand = next((words for line in _lines(root / "proc/cpuinfo") for key, _, words in (line.partition(": "),)
                  if key.strip() == "model name"), "") or brand_string() or ""
    return Probe(platform.machine(), info.vendor, info.cpu_part, brand, frozenset(isa), usable_cores(root), _caches(root), *_memory(root))


def list_devices(profiles: Iterable[Hardware], found: Probe | None = None) -> Listing:
    """The one device, ``cpu:0``, and a reason when it has no native kernels.

    Args:
        profiles: The parts known by name, to find the one that this machine matches.
        found: What was probed; by default this machine is.
    """
    found = found or probe()
    match = closest(found, profiles)
    arch = match.facts["arch"] if match else found.machine
    family = match.facts["arch_family"] if match else _FAMILIES.get(found.machine, found.machine)
    facts = Facts({
        "arch": arch, "arch_family": family, "vendor": found.vendor, "isa": found.isa, "dtypes": dtypes(found.isa), "cores": found.cores,
        "cpu.native_isa": native_levels(found.isa), **found.caches, **_known_memory(found), **_environment(found.machine),
    })
    reasons = () if is_built() else (Reason(
        "FIT-BUILD-CPU-NATIVE", Kind.BUILD, "cpu.native_isa", "the native kernels",
        "not built: when fitment-cpu was installed, a C++20 compiler was missing or failed", REBUILD),)
    title = found.brand or (match.title if match else found.machine)
    return Listing((Device("cpu:0", "cpu", match.name if match else "", title, facts),), reasons)


REBUILD = "install a C++20 compiler (g++ 11 or newer), then: pip install --force-reinstall --no-deps fitment-cpu"


def dtypes(isa: frozenset[str]) -> frozenset[str]:
    """The element types that a processor with these features multiplies directly."""
    return frozenset(("fp32", *(dtype for dtype, features in _DTYPES.items() if isa.intersection(features))))


def closest(found: Probe, profiles: Iterable[Hardware]) -> Hardware | None:
    """The profile with the most features among those whose features (but for what hypervisors hide) this machine has.

    The very core, where its number is known, comes before any other.
    """
    best: tuple[tuple[bool, int], Hardware] | None = None
    for profile in profiles:
        isa = profile.facts["isa"]
        assert isinstance(isa, frozenset)
        target = TARGETS.get(str(profile.facts["arch"]))
        if target is None or str(target.family) != _FAMILIES.get(found.machine, found.machine):
            continue
        if target.vendor not in ("generic", found.vendor) or not _telling(isa) <= found.isa:
            continue
        rank = (bool(found.part) and target.cpu_part == found.part, len(isa))
        if best is None or rank > best[0]:
            best = (rank, profile)
    return best[1] if best else None


def _telling(isa: frozenset[str]) -> frozenset[str]:
    return frozenset(feature for feature in isa if not feature.startswith(_SECONDARY))


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores that this process may use: those of its affinity mask, cut by the quotas of its control groups; at least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = (_words(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in allowed)
    count = len({tuple(words) or (str(cpu),) for cpu, words in zip(allowed, siblings, strict=True)})
    for folder in _control_groups(root):
        for quota in (_words(folder / "cpu.max"), _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")):
            if len(quota) == 2 and all(word.isdigit() for word in quota) and int(quota[1]):  # not "max 100000", "-1 100000"
                count = min(count, -(-int(quota[0]) // int(quota[1])))
    return max(1, count)


def _control_groups(root: Path) -> list[Path]:
    """The folders of this process's control groups, of version 2 and 1, and of the groups above them."""
    found: dict[Path, None] = {}
    for line in _lines(root / "proc/self/cgroup"):  # "0::/user.slice" or "4:cpu,cpuacct:/docker/1f2e"
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        top = root / "sys/fs/cgroup" / controllers
        folder = top / path.lstrip("/")
        found.update(dict.fromkeys((folder, *(above for above in folder.parents if above.is_relative_to(top)))))
    return list(found)


def _memory(root: Path) -> tuple[int, int]:
    """Bytes of memory in all and free for use, cut by the limits of this process's control groups; 0 where it cannot be found."""
    try:
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        total = available = 0
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            total = 1024 * int(line.split()[1])
        elif line.startswith("MemAvailable:"):
            available = 1024 * int(line.split()[1])
    for folder in _control_groups(root):
        for limit, used, reclaimable in _MEMORY_FILES:
            words, current = _words(folder / limit), _words(folder / used)
            if words and words[0].isdigit():  # not "max"
                kept = int(current[0]) - _stat(folder / "memory.stat", reclaimable) if current else 0
                total = min(total, int(words[0]))
                available = min(available, int(words[0]) - max(kept, 0))
    return total, max(available, 0)


_MEMORY_FILES = (("memory.max", "memory.current", "inactive_file"),
                 ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
"""A control group's limit, use, and the line of memory.stat for the part that is given up on demand: version 2, version 1."""


def _stat(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(f"{name} ")), 0)


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _caches(root: Path) -> dict[str, int]:
    """Cache sizes by fact key."""
    found = {}
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
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
