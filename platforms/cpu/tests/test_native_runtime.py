"""The extension's machinery: which instruction set runs, threads, forks, the interpreter's lock, installation without a compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
import torch

import fitment

native = pytest.importorskip("fitment_cpu._native", reason="fitment-cpu was installed without a compiler")

from fitment.errors import FitmentError  # noqa: E402
from fitment.weights.dense import Dense  # noqa: E402
from fitment_cpu._build import LEVELS  # noqa: E402
from fitment_cpu.kernels import _launch  # noqa: E402
from fitment_cpu.kernels.linear import linear_fp32  # noqa: E402
from fitment_cpu.kernels.weights import PackedWeight, prepare  # noqa: E402

MEMBER = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("native_settings")


@pytest.fixture(scope="module")
def weight() -> PackedWeight:
    return prepare(Dense(torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))))


def product(weight: PackedWeight, n: int = 4) -> torch.Tensor:
    x = torch.randn(n, weight.shape[1], generator=torch.Generator().manual_seed(n))
    out = torch.empty(n, weight.shape[0])
    linear_fp32(x, weight, out)
    return out


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=120,
                          check=False)


# ---- instruction sets --------------------------------------------------------------------------------------------------------

def test_the_levels_are_those_that_the_kernel_reports_for_this_processor() -> None:
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        assert native.levels() == ["generic"]
        return
    flags = set(next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split())
    wanted = ["generic"]
    for level, needed in (("avx2", {"avx2", "fma", "f16c"}), ("avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
                          ("avx512_vnni", {"avx512_vnni"}), ("avx512_bf16", {"avx512_bf16"})):
        if not needed <= flags:
            break
        wanted.append(level)
    assert native.levels() == wanted


@pytest.mark.parametrize("level", [*LEVELS, "sse9"])
def test_the_variable_sets_the_level_and_names_one_that_does_not_run_here(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITMENT_CPU_ISA", level)
    if level in native.levels():
        _launch._set_up()
        assert native.level() == level
    else:
        with pytest.raises(FitmentError, match=rf"FITMENT_CPU_ISA={level}: .*{', '.join(native.levels())}"):
            _launch._set_up()


def test_the_variables_are_taken_when_the_kernels_load() -> None:
    run = python("from fitment_cpu.kernels._launch import native; print(native.level(), native.num_threads())",
                 FITMENT_CPU_ISA="generic", FITMENT_CPU_THREADS="3")
    assert run.stdout == "generic 3\n", run.stderr


def test_a_level_that_is_not_there_is_not_set() -> None:
    before = native.level()
    assert not native.set_level("avx1024")
    assert native.level() == before


# ---- threads -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "1000000"])
def test_an_impossible_number_of_threads_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITMENT_CPU_THREADS", value)
    with pytest.raises(FitmentError, match=f"FITMENT_CPU_THREADS={value}: "):
        _launch._set_up()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_no_more_threads_than_the_affinity_mask_allows() -> None:
    script = ("import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
              "from fitment_cpu.kernels._launch import native; print(native.num_threads())")
    assert python(script, FITMENT_CPU_THREADS="").stdout == "1\n"


def test_results_do_not_depend_on_the_number_of_threads(weight: PackedWeight) -> None:
    native.set_num_threads(1)
    wanted = product(weight)
    for count in (2, 3, 7, 2, 1):
        native.set_num_threads(count)
        assert torch.equal(product(weight), wanted), count


def test_idle_threads_cost_nothing(weight: PackedWeight) -> None:
    native.set_num_threads(4)
    product(weight)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.02


def test_launches_from_several_threads_take_turns(weight: PackedWeight) -> None:
    native.set_num_threads(3)
    wanted = {n: product(weight, n) for n in (1, 5, 9)}
    wrong: list[int] = []

    def work(n: int) -> None:
        wrong.extend(n for _ in range(50) if not torch.equal(product(weight, n), wanted[n]))

    workers = [threading.Thread(target=work, args=(n,)) for n in wanted]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert not wrong


def test_the_interpreter_runs_on_while_a_launch_does() -> None:
    weight, x = prepare(Dense(torch.ones(2048, 2048))), torch.ones(256, 2048)
    out, over, turns = torch.empty(256, 2048), threading.Event(), 0

    def work() -> None:
        for _ in range(3):
            linear_fp32(x, weight, out)
        over.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not over.is_set():
        time.sleep(0.001)
        turns += 1
    worker.join()
    assert turns > 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_after_a_fork_makes_threads_of_its_own() -> None:
    script = """
import os, sys, torch
from fitment.weights.dense import Dense
from fitment_cpu.graph import CpuGraphCapture
from fitment_cpu.kernels._launch import native
from fitment_cpu.kernels.linear import linear_fp32
from fitment_cpu.kernels.weights import prepare
native.set_num_threads(3)
weight, x, out = prepare(Dense(torch.randn(512, 512))), torch.randn(8, 512), torch.zeros(8, 512)
graph = CpuGraphCapture().capture(lambda: linear_fp32(x, weight, out))
wanted = out.clone()
child = os.fork()
again = torch.zeros(8, 512)
linear_fp32(x, weight, again)
out.zero_()
graph.replay()
is_right = torch.equal(again, wanted) and torch.equal(out, wanted)
if child == 0:
    os._exit(0 if is_right else 3)
assert is_right
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("both")
"""
    run = python(script)
    assert run.stdout == "both\n", run.stderr


# ---- without a compiler ------------------------------------------------------------------------------------------------------

def test_it_installs_without_a_compiler_and_says_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core", reason="the build tools are not installed (requirements-build.txt)")
    nowhere = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    source = shutil.copytree(MEMBER, tmp_path / "source", ignore=shutil.ignore_patterns("_native*", "build", "tests", "__pycache__"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--target", str(tmp_path / "site"),
               "--config-settings", f"build-dir={tmp_path / 'build'}", str(source)]
    done = subprocess.run(install, env=os.environ | nowhere, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    package = tmp_path / "site" / "fitment_cpu"
    assert (package / "plugin.py").exists()
    assert not list(package.glob("_native*"))
    script = f"""
import sys
sys.path[:0] = [{str(tmp_path / "site")!r}, {str(Path(fitment.__file__).parents[1])!r}, {sysconfig.get_paths()["purelib"]!r}]
from fitment_cpu._build import is_built, native_levels
from fitment_cpu.plugin import fitment_devices
assert not is_built() and native_levels(frozenset(("avx2", "fma", "f16c"))) == frozenset()
print(*(reason.sentence() if hasattr(reason, "sentence") else reason for reason in fitment_devices().reasons))
assert "torch" not in sys.modules
"""
    # Neither site packages' .pth files nor this checkout may stand in for what was installed.
    told = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    assert "compiler" in told.stdout
