"""What is found out about a processor: on made-up machines, and on the real ones whose /proc/cpuinfo archspec keeps for its tests."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.resources import files
from pathlib import Path

import pytest
from archspec.cpu import TARGETS
from archspec.cpu.detect import _canonicalize_aarch64_vendor, partial_uarch

from fitment.errors import FitmentError
from fitment.facts import FactRegistry
from fitment.hardware import load_hardware
from fitment_cpu import _build, detect, plugin

GIB = 1 << 30
PROFILES = load_hardware(Path(plugin.__file__).with_name("hardware.toml"), "cpu")
MACHINES = files("archspec") / "json" / "tests" / "targets"
PLAIN = detect.Probe("x86_64", "GenuineIntel", "", "A processor", frozenset(("sse2",)), 4, {}, 0, 0)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's limit on instruction sets does not reach into these tests."""
    monkeypatch.delenv(_build.ISA_VARIABLE, raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Writes files, by their paths, under a root of /proc and /sys; returns the root."""

    def write(contents: dict[str, str]) -> Path:
        for name, text in contents.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


def allow(monkeypatch: pytest.MonkeyPatch, cpus: set[int]) -> None:
    """This process's affinity mask."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cpus, raising=False)


def siblings(*groups: str) -> dict[str, str]:
    """Processors by core: ``siblings("0,4", "1,5")`` is two cores of two threads."""
    return {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{group}\n"
            for group in groups for cpu in group.split(",")}


def read_machine(name: str, monkeypatch: pytest.MonkeyPatch, write: Callable[[dict[str, str]], Path]) -> detect.Probe:
    """What the probe finds on one of archspec's machines."""
    text = (MACHINES / name).read_text(encoding="utf-8")
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    first = {key.strip(): value.strip() for key, _, value in lines}
    if "flags" in first:
        info = partial_uarch(vendor=first["vendor_id"], features=set(first["flags"].split()))
    else:
        info = partial_uarch(vendor=_canonicalize_aarch64_vendor(first), features=set(first["Features"].split()),
                             cpu_part=first["CPU part"])
    monkeypatch.setattr(detect, "detected_info", lambda: info)
    monkeypatch.setattr(detect, "brand_string", lambda: None)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64" if "flags" in first else "aarch64")
    return detect.probe(write({"proc/cpuinfo": text}))


@pytest.mark.parametrize(("machine", "profile", "dtypes", "levels"), [
    ("linux-scientific7-k10", "", "fp32", "generic"),  # no SSE4.2
    ("linux-rhel6-piledriver", "x86-64-v2", "fp32", "generic"),
    ("linux-rhel7-ivybridge", "x86-64-v2", "fp32", "generic"),
    ("linux-rhel7-haswell", "haswell", "fp32", "generic avx2"),
    ("linux-rhel7-broadwell", "haswell", "fp32", "generic avx2"),
    ("linux-ubuntu24.04-alderlake", "haswell", "fp32 int8", "generic avx2"),
    ("linux-rhel7-skylake_avx512", "skylake-avx512", "fp32", "generic avx2 avx512"),
    ("linux-centos7-cascadelake", "cascadelake", "fp32 int8", "generic avx2 avx512 avx512_vnni"),
    ("linux-unknown-sapphirerapids", "sapphirerapids", "bf16 fp16 fp32 int8", "generic avx2 avx512 avx512_vnni avx512_bf16"),
    ("linux-rhel7-zen", "x86-64-v3", "fp32", "generic avx2"),
    ("linux-ubuntu20.04-zen3", "zen3", "fp32", "generic avx2"),
    ("linux-rocky8.5-zen4", "zen4", "bf16 fp32 int8", "generic avx2 avx512 avx512_vnni avx512_bf16"),
    ("linux-rocky9-zen5", "zen5", "bf16 fp32 int8", "generic avx2 avx512 avx512_vnni avx512_bf16"),
    ("linux-amazon-cortex_a72", "aarch64", "fp32", "generic"),
    ("linux-rocky8-a64fx", "aarch64", "fp16 fp32", "generic"),
    ("linux-amazon-neoverse_n1", "neoverse-n1", "fp16 fp32 int8", "generic"),
    ("linux-amazon-neoverse_v1", "neoverse-v1", "bf16 fp16 fp32 int8", "generic"),
    ("linux-rhel9-neoverse_n2", "neoverse-n2", "bf16 fp16 fp32 int8", "generic"),
    ("linux-rhel9-neoverse_v2", "neoverse-v2", "bf16 fp16 fp32 int8", "generic"),
    ("linux-asahi-m1", "m1-linux", "fp16 fp32 int8", "generic"),
    ("linux-asahi-m2", "m2-linux", "bf16 fp16 fp32 int8", "generic"),
])
def test_real_machines(machine: str, profile: str, dtypes: str, levels: str, monkeypatch: pytest.MonkeyPatch,
                       write: Callable[[dict[str, str]], Path]) -> None:
    monkeypatch.setattr(_build, "is_built", lambda: True)
    found = read_machine(machine, monkeypatch, write)
    listing = detect.list_devices(PROFILES, found)
    (device,) = listing.devices
    assert device.hardware == profile
    assert device.facts["dtypes"] == frozenset(dtypes.split())
    assert device.facts["cpu.native_isa"] == frozenset(levels.split())
    assert device.facts["arch_family"] == found.machine
    assert FactRegistry(plugin.fitment_fact_keys()).problems(device.facts) == []


def test_the_brand_is_the_title_and_else_the_profiles(monkeypatch: pytest.MonkeyPatch, write: Callable[[dict[str, str]], Path]) -> None:
    intel = detect.list_devices(PROFILES, read_machine("linux-centos7-cascadelake", monkeypatch, write)).devices[0]
    assert intel.title == "Intel(R) Xeon(R) Platinum 8260M CPU @ 2.40GHz"
    arm = detect.list_devices(PROFILES, read_machine("linux-amazon-neoverse_n1", monkeypatch, write)).devices[0]
    assert arm.title == "Arm Neoverse N1 (Graviton 2, Ampere Altra)"
    nothing = detect.list_devices((), replace(PLAIN, brand="", machine="riscv64")).devices[0]
    assert (nothing.title, nothing.hardware, nothing.facts["arch"], nothing.facts["arch_family"]) == ("riscv64", "", "riscv64", "riscv64")


def test_a_hypervisor_may_hide_what_no_kernel_uses(monkeypatch: pytest.MonkeyPatch, write: Callable[[dict[str, str]], Path]) -> None:
    found = read_machine("linux-rocky8.5-zen4", monkeypatch, write)
    hidden = found.isa - {"pku", "flush_l1d", "rdseed", "sha_ni"}
    assert found.isa - hidden == {"pku", "flush_l1d", "rdseed", "sha_ni"}
    match = detect.closest(replace(found, isa=hidden), PROFILES)
    assert match is not None
    assert match.name == "zen4"
    match = detect.closest(replace(found, isa=hidden - {"avx512_bf16"}), PROFILES)
    assert match is not None
    assert match.name == "zen3"


def test_another_makers_processor_matches_a_level(monkeypatch: pytest.MonkeyPatch, write: Callable[[dict[str, str]], Path]) -> None:
    found = read_machine("linux-rocky8.5-zen4", monkeypatch, write)
    match = detect.closest(replace(found, vendor="HygonGenuine"), PROFILES)
    assert match is not None
    assert match.name == "x86-64-v4"
    assert detect.closest(replace(found, machine="ppc64le"), PROFILES) is None


@pytest.mark.parametrize(("machine", "is_known"), [("arm64", True), ("ARM64", True), ("aarch64", True), ("x86_64", False)])
def test_other_systems_spell_the_family_otherwise(machine: str, is_known: bool) -> None:
    found = replace(PLAIN, machine=machine, vendor="Apple", isa=frozenset(TARGETS["m1"].features))
    match = detect.closest(found, PROFILES)
    assert (match is not None and match.name == "m1-linux") == is_known


def test_macos_tells_the_model_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(detect, "detected_info", lambda: partial_uarch(name="m1", vendor="Apple"))
    monkeypatch.setattr(detect, "brand_string", lambda: "Apple M1 Pro")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    found = detect.probe(tmp_path)
    assert found.brand == "Apple M1 Pro"
    assert {"asimddp", "fphp"} <= found.isa
    device = detect.list_devices(PROFILES, found).devices[0]
    assert (device.hardware, device.facts["arch"], device.facts["machine"]) == ("m1-linux", "m1", "arm64")


def test_a_machine_that_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(detect, "detected_info", lambda: partial_uarch(vendor="generic"))
    monkeypatch.setattr(detect, "brand_string", lambda: None)
    monkeypatch.setattr(platform, "machine", lambda: "")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(os, "sysconf", refuse)
    monkeypatch.setattr(os, "confstr", refuse)
    found = detect.probe(tmp_path)
    assert found == detect.Probe("", "generic", "", "", frozenset(), 1, {}, 0, 0)
    facts = detect.list_devices(PROFILES, found).devices[0].facts
    assert "memory_bytes" not in facts  # unknown, which is not zero
    assert "memory_available_bytes" not in facts
    assert "glibc" not in facts
    assert facts["dtypes"] == frozenset(("fp32",))
    assert FactRegistry(plugin.fitment_fact_keys()).problems(facts) == []


def test_this_machine() -> None:
    listing = detect.list_devices(PROFILES)
    (device,) = listing.devices
    assert (device.id, device.platform, device.torch_device) == ("cpu:0", "cpu", "cpu")
    assert FactRegistry(plugin.fitment_fact_keys()).problems(device.facts) == []
    assert device.facts["python"] == platform.python_version()
    memory, available = device.facts["memory_bytes"], device.facts["memory_available_bytes"]
    assert isinstance(memory, int)
    assert isinstance(available, int)
    assert 0 < available <= memory


def test_the_extension_finds_the_levels_that_the_description_says(monkeypatch: pytest.MonkeyPatch) -> None:
    native = pytest.importorskip("fitment_cpu._native", reason="fitment-cpu was installed without its extension")
    assert frozenset(native.levels()) == _build.levels(detect.probe().isa)
    monkeypatch.setattr(_build, "is_built", lambda: True)
    assert _build.native_levels(detect.probe().isa) == frozenset(native.levels())


@pytest.mark.parametrize(("limit", "levels"), [
    ("", "generic avx2 avx512 avx512_vnni"),
    ("generic", "generic"),
    ("avx512", "generic avx2 avx512"),
    ("avx512_bf16", "generic avx2 avx512 avx512_vnni"),  # no more than there is
])
def test_the_operator_can_limit_the_levels(limit: str, levels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_build.ISA_VARIABLE, limit)
    assert _build.levels(frozenset(TARGETS["cascadelake"].features)) == frozenset(levels.split())


def test_a_level_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_build.ISA_VARIABLE, "avx10")
    with pytest.raises(FitmentError, match="FITMENT_CPU_ISA=avx10: no such level; levels are generic, avx2, "):
        _build.levels(frozenset())


def test_a_level_needs_all_below_it() -> None:
    assert _build.levels(frozenset(("avx2", "f16c", "avx512_bf16", "avx512_vnni"))) == {"generic"}  # no fma


def test_without_the_extension_there_is_a_reason_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_build, detect):
        monkeypatch.setattr(module, "is_built", lambda: False)
    listing = detect.list_devices(PROFILES, replace(PLAIN, isa=frozenset(TARGETS["zen4"].features)))
    assert listing.devices[0].facts["cpu.native_isa"] == frozenset()
    (reason,) = listing.reasons
    assert (reason.code, reason.key) == ("FIT-BUILD-CPU-NATIVE", "cpu.native_isa")
    assert "pip install --force-reinstall --no-deps fitment-cpu" in reason.remedy
    monkeypatch.setattr(detect, "is_built", lambda: True)
    assert detect.list_devices(PROFILES, PLAIN).reasons == ()


# Cores


@pytest.mark.parametrize(("allowed", "cores"), [({0, 1, 2, 3, 4, 5, 6, 7}, 4), ({0, 4}, 1), ({0, 1}, 2), ({0, 1, 5}, 2), ({6}, 1)])
def test_threads_of_one_core_count_once(allowed: set[int], cores: int, monkeypatch: pytest.MonkeyPatch,
                                        write: Callable[[dict[str, str]], Path]) -> None:
    allow(monkeypatch, allowed)
    assert detect.usable_cores(write(siblings("0,4", "1,5", "2,6", "3,7"))) == cores


def test_without_a_topology_every_processor_is_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allow(monkeypatch, {2, 3, 9})
    assert detect.usable_cores(tmp_path) == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert detect.usable_cores(tmp_path) == 6


@pytest.mark.parametrize(("groups", "cores"), [
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "100000 100000\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 1),
    ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/other/cpu.max": "100000 100000\n"}, 8),
    ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/cpu.max": "500000 100000\n"}, 5),
    ({"proc/self/cgroup": "7:cpu,cpuacct:/d\n", "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_quota_us": "400000\n",
      "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_period_us": "100000\n"}, 4),
    ({"proc/self/cgroup": "7:cpu:/\n0::/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"}, 8),
    ({"proc/self/cgroup": "nonsense\n\n0::/\n"}, 8),
])
def test_a_control_groups_quota_cuts_the_cores(groups: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch,
                                               write: Callable[[dict[str, str]], Path]) -> None:
    allow(monkeypatch, set(range(8)))
    assert detect.usable_cores(write(groups)) == cores


# Memory and caches

MEMINFO = {"proc/meminfo": f"MemTotal:       {16 * GIB // 1024} kB\nMemFree:         1024 kB\nMemAvailable:   {12 * GIB // 1024} kB\n"}
V2, V1 = {"proc/self/cgroup": "0::/a/b\n"}, {"proc/self/cgroup": "5:cpu:/\n4:memory:/d\n"}


@pytest.mark.parametrize(("groups", "total", "available"), [
    ({}, 16, 12),
    ({**V2, "sys/fs/cgroup/a/b/memory.max": "max\n"}, 16, 12),
    ({**V2, "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n"}, 4, 4),
    ({**V2, "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n"}, 4, 3),
    ({**V2, "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/a/b/memory.current": f"{3 * GIB}\n",
      "sys/fs/cgroup/a/b/memory.stat": f"anon {GIB}\nactive_file 7\ninactive_file {2 * GIB}\n"}, 4, 3),
    ({**V2, "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/a/b/memory.current": f"{5 * GIB}\n"}, 4, 0),
    ({**V2, "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
      "sys/fs/cgroup/a/memory.current": f"{7 * GIB}\n"}, 4, 1),  # siblings have used up the parent
    ({**V2, "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n"}, 2, 2),
    ({**V1, "sys/fs/cgroup/memory/d/memory.limit_in_bytes": "9223372036854771712\n",
      "sys/fs/cgroup/memory/d/memory.usage_in_bytes": f"{GIB}\n"}, 16, 12),
    ({**V1, "sys/fs/cgroup/memory/d/memory.limit_in_bytes": f"{6 * GIB}\n", "sys/fs/cgroup/memory/d/memory.usage_in_bytes": f"{5 * GIB}\n",
      "sys/fs/cgroup/memory/d/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n"}, 6, 2),
])
def test_memory_is_cut_by_control_groups(groups: dict[str, str], total: int, available: int,
                                         write: Callable[[dict[str, str]], Path]) -> None:
    found = detect._memory(write({**MEMINFO, **groups}))
    assert found == (total * GIB, available * GIB)


def test_memory_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1 << 20}.__getitem__)
    assert detect._memory(tmp_path) == (16 * GIB, 16 * GIB)


def test_caches(write: Callable[[dict[str, str]], Path]) -> None:
    folder = "sys/devices/system/cpu/cpu0/cache"
    files = {}
    for i, (level, kind, size) in enumerate((("1", "Data", "48K"), ("1", "Instruction", "64K"), ("2", "Unified", "2048K"),
                                             ("3", "Unified", "32M"), ("4", "Unified", "1M"), ("3", "Unified", "?"))):
        for name, value in (("level", level), ("type", kind), ("size", size)):
            files[f"{folder}/index{i}/{name}"] = f"{value}\n"
    found = detect._caches(write(files))
    assert found == {"cache_l1d_bytes": 48 << 10, "cache_l2_bytes": 2 << 20, "cache_l3_bytes": 32 << 20}


def test_caches_that_are_not_told(write: Callable[[dict[str, str]], Path]) -> None:
    folder = "sys/devices/system/cpu/cpu0/cache"
    assert detect._caches(write({f"{folder}/index0/level": "1\n", f"{folder}/index0/type": "Data\n"})) == {}


def test_torch_that_is_not_installed_is_no_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(detect, "version", refuse)
    monkeypatch.setattr(os, "confstr", lambda _name: "musl 1.2")
    facts = detect.list_devices(PROFILES, PLAIN).devices[0].facts
    assert "torch" not in facts
    assert "glibc" not in facts
