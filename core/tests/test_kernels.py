"""Selection and its trace, entries that are loaded when bound, and the digest of sources."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from fitment.conditions import ALWAYS, Condition, all_of, at_least, equals, has
from fitment.facts import FactRegistry, Value
from fitment.kernels import Kernel, Selection, Speed, load_entry, missing_sources, select, sources_digest

REGISTRY = FactRegistry()
FACTS: dict[str, Value] = {"arch": "zen4", "dtype": "bf16"}


def kernel(name: str, condition: Condition = ALWAYS, speed: Speed = Speed.PORTABLE, priority: int = 0, op: str = "linear") -> Kernel:
    return Kernel(op, name, "acme.kernels:run", condition, speed, priority)


def choose(*kernels: Kernel, wanted: str | None = None, facts: dict[str, Value] | None = None) -> Selection:
    return select("linear", FACTS if facts is None else facts, kernels, REGISTRY, wanted)


def order(found: Selection) -> list[str]:
    return [verdict.kernel.name for verdict in found.trace]


YES, NO, TWICE_NO = equals("arch", "zen4"), equals("arch", "zen5"), equals("arch", "zen5") & equals("dtype", "fp32")
UNKNOWN = at_least("cores", 8)


@pytest.mark.parametrize(("better", "worse"), [
    (kernel("b", speed=Speed.NATIVE), kernel("a", speed=Speed.PORTABLE, priority=9)),
    (kernel("b", speed=Speed.PORTABLE), kernel("a", speed=Speed.REFERENCE)),
    (kernel("b", priority=1), kernel("a", priority=0)),
    (kernel("a"), kernel("b")),
    (kernel("b", YES, Speed.REFERENCE), kernel("a", NO, Speed.NATIVE)),
    (kernel("b", speed=Speed.REFERENCE), kernel("a", UNKNOWN, Speed.NATIVE)),
])
def test_of_two_kernels(better: Kernel, worse: Kernel) -> None:
    for pair in permutations((better, worse)):
        found = choose(*pair)
        assert found.chosen == better
        assert order(found) == [better.name, worse.name]
        assert found.reasons == ()


def test_the_trace_is_every_kernel_of_the_op_best_first() -> None:
    kernels = [kernel("slow", speed=Speed.REFERENCE), kernel("far", TWICE_NO, Speed.NATIVE), kernel("near", NO),
               kernel("maybe", UNKNOWN, Speed.REFERENCE), kernel("fast", YES, Speed.NATIVE), kernel("other", op="rotary"),
               kernel("nearer", NO, Speed.NATIVE)]
    found = choose(*kernels)
    assert order(found) == ["fast", "slow", "maybe", "nearer", "near", "far"]
    assert found.chosen is not None
    assert found.chosen.name == "fast"
    assert [verdict.is_admitted for verdict in found.trace] == [True, True, False, False, False, False]
    assert [verdict.is_unknown for verdict in found.trace] == [False, False, True, False, False, False]
    assert [[reason.code for reason in verdict.reasons] for verdict in found.trace[2:]] == [
        ["FIT-HW-CORES"], ["FIT-HW-ARCH"], ["FIT-HW-ARCH"], ["FIT-HW-ARCH", "FIT-REQ-DTYPE"]]


@pytest.mark.parametrize(("kernels", "codes", "unknown"), [
    ([kernel("far", TWICE_NO), kernel("near", NO)], ["FIT-HW-ARCH"], [False]),
    ([kernel("no", NO), kernel("maybe", UNKNOWN & has("isa", "avx2"))], ["FIT-HW-CORES", "FIT-HW-ISA"], [True, True]),
])
def test_nothing_fits_for_the_reasons_of_the_nearest(kernels: list[Kernel], codes: list[str], unknown: list[bool]) -> None:
    found = choose(*kernels)
    assert found.chosen is None
    assert [reason.code for reason in found.reasons] == codes
    assert [reason.unknown for reason in found.reasons] == unknown


def test_an_op_that_nobody_registered() -> None:
    found = choose(kernel("other", op="rotary"))
    assert found.chosen is None
    assert found.trace == ()
    (reason,) = found.reasons
    assert (reason.code, reason.wanted, reason.found) == ("FIT-OP-LINEAR", "a kernel for linear", "none")
    assert reason.remedy


def test_what_is_asked_for_by_name_is_used() -> None:
    slow, fast = kernel("slow", speed=Speed.REFERENCE), kernel("fast", speed=Speed.NATIVE)
    found = choose(slow, fast, wanted="slow")
    assert found.chosen == slow
    assert order(found) == ["slow"]


def test_or_refused_and_never_replaced() -> None:
    found = choose(kernel("fast", NO, Speed.NATIVE), kernel("slow"), wanted="fast")
    assert found.chosen is None
    assert [reason.code for reason in found.reasons] == ["FIT-HW-ARCH"]


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    found = choose(kernel("slow"), kernel("fast", NO), kernel("turn", op="rotary"), wanted="turn")
    assert found.chosen is None
    (reason,) = found.reasons
    assert reason.code == "FIT-REQ-KERNEL"
    assert reason.sentence() == "needs kernel 'turn' for linear; kernel is not among fast, slow"
    assert [verdict.is_admitted for verdict in found.trace] == [False, False]
    assert choose(wanted="turn").chosen is None


def test_a_condition_sees_the_device_and_the_call() -> None:
    both = kernel("both", all_of(equals("arch", "zen4"), equals("dtype", "bf16")))
    assert choose(both).chosen == both
    assert choose(both, facts={"arch": "zen4"}).trace[0].is_unknown


# Entries


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package ``entry_samples`` with a good module and broken ones."""
    folder = tmp_path / "entry_samples"
    (folder / "native").mkdir(parents=True)
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / "good.py").write_text("def run(x):\n    return x + 1\n\nclass Holder:\n    pass\n", encoding="utf-8")
    (folder / "raises.py").write_text("raise OSError('libacme.so.2: cannot open')\n", encoding="utf-8")
    (folder / "slips.py").write_text("import os\nos.no_such_thing\n", encoding="utf-8")
    (folder / "native" / "a.cpp").write_bytes(b"int a;\n")
    (folder / "native" / "b.cpp").write_bytes(b"int b;\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "entry_samples"]:
        del sys.modules[name]


def test_an_entry_is_loaded_when_it_is_asked_for(package: Path) -> None:
    made = Kernel("linear", "k", "entry_samples.good:run", prepare="entry_samples.good:Holder")
    assert package.name not in sys.modules
    assert made.load()(1) == 2
    assert made.load_prepare().__name__ == "Holder"
    assert kernel("k").load_prepare()("as it is") == "as it is"
    assert made.package == "entry_samples"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("entry", "words"), [
    ("entry_samples.good:jog", "entry 'entry_samples.good:jog': module 'entry_samples.good' has no attribute 'jog'"),
    ("entry_samples.gone:run", "entry 'entry_samples.gone:run': module 'entry_samples.gone' cannot be imported: ModuleNotFoundError: "),
    ("no_such_package:run", "entry 'no_such_package:run': .* ModuleNotFoundError: No module named 'no_such_package'"),
    ("entry_samples.raises:run", "entry 'entry_samples.raises:run': .* OSError: libacme.so.2: cannot open"),
    ("entry_samples.slips:run", "entry 'entry_samples.slips:run': .* cannot be imported: AttributeError: "),
])
def test_an_entry_that_cannot_be_loaded_is_named(entry: str, words: str) -> None:
    with pytest.raises(ImportError, match=words):
        load_entry(entry)


# Sources


def sourced(*sources: str) -> Kernel:
    return Kernel("linear", "k", "entry_samples.raises:run", sources=sources)  # the digest imports nothing


@pytest.mark.usefixtures("package")
def test_the_digest_is_over_names_and_contents_sorted() -> None:
    wanted = hashlib.sha256(b"native/a.cpp\0int a;\n\0native/b.cpp\0int b;\n\0").hexdigest()
    assert sources_digest(sourced("native/b.cpp", "native/a.cpp")) == wanted
    assert sources_digest(sourced("native/a.cpp", "native/b.cpp")) == wanted
    assert sources_digest(sourced("native/a.cpp")) == hashlib.sha256(b"native/a.cpp\0int a;\n\0").hexdigest()


@pytest.mark.usefixtures("package")
def test_without_sources_there_is_no_digest() -> None:
    assert sources_digest(sourced()) is None
    assert sources_digest(sourced("native/a.cpp", "native/gone.cpp")) is None
    assert missing_sources(sourced("native/a.cpp", "native/gone.cpp", "native")) == ("native/gone.cpp", "native")
    elsewhere = Kernel("linear", "k", "no_such_package.kernels:run", sources=("a.py",))
    assert missing_sources(elsewhere) == ("a.py",)


def test_selection_imports_no_torch() -> None:
    code = "import sys, fitment.kernels, fitment.hardware, fitment.plugins; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
