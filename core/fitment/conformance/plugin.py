"""The kit's options, what its tests are run on, and the evidence of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fitment.conformance import _evidence
from fitment.conformance._session import Session, open_session
from fitment.conformance.checks import Bench
from fitment.errors import FitmentError
from fitment.kernels import Kernel

_SESSION = pytest.StashKey[Session]()
_TALLY = pytest.StashKey[_evidence.Tally]()
_PROPERTY = "fitment.kernel"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What to check, and where to write that it was."""
    group = parser.getgroup("fitment conformance")
    group.addoption("--platform", metavar="NAME", help="the platform whose kernels are checked; FITMENT_PLUGINS=name=module adds one")
    group.addoption("--device", metavar="ID", help="the device to check them on, such as cuda:1 (default: the first)")
    group.addoption("--kernel", metavar="NAME", action="append", default=[], help="check this kernel only; may be given again")
    group.addoption("--evidence", metavar="FILE", type=Path, help="write which kernels passed, with versions and digests, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Open the session; what the command line got wrong is a usage error."""
    if config.option.help:
        return
    torch.set_num_threads(1)  # the reference's tensors are so small that threads would only wait for each other
    evidence = config.option.evidence
    try:
        if evidence is not None and not evidence.absolute().parent.is_dir():
            raise FitmentError(f"--evidence {evidence}: there is no folder {evidence.parent}")
        config.stash[_SESSION] = open_session(config.option.platform, config.option.device, config.option.kernel)
    except FitmentError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_TALLY] = _evidence.Tally()


def pytest_report_header(config: pytest.Config) -> str:
    """The platform and the device."""
    session = config.stash[_SESSION]
    device = session.device
    where = f"{device.id} ({device.hardware or 'no known profile'}, {device.title})" if device else session.absence
    return f"conformance of {' '.join(filter(None, (session.platform.name, session.platform.version)))} on {where}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each kernel and case."""
    session = metafunc.config.stash[_SESSION]
    parameters = {"test_agrees": _agrees, "test_captured": _captured, "test_reads_back": _reads_back}.get(metafunc.function.__name__)
    if parameters is not None:
        names = ("write", "attention", "trip") if parameters is _reads_back else ("kernel", "case")
        metafunc.parametrize(names, parameters(session))
    elif "kernel" in metafunc.fixturenames:
        marks = [pytest.mark.skip(session.absence)] if session.absence and "bench" in metafunc.fixturenames else []
        metafunc.parametrize("kernel", [_param(f"{kernel.op}/{kernel.name}", kernel, marks=marks) for kernel in session.kernels])


def _param(name: str, *values: object, marks: Sequence[pytest.MarkDecorator] = ()) -> Any:
    return pytest.param(*values, id=name, marks=marks)


def _skipped(name: str, count: int, why: str) -> Any:
    return _param(name, *(None,) * count, marks=[pytest.mark.skip(why)])


def _agrees(session: Session) -> list[Any]:
    served = list(session.admitted()) if session.bench else []
    unserved = [_skipped(f"{kernel.op}/{kernel.name}", 2, why) for kernel in session.kernels if (why := session.unserved(kernel))]
    return [_param(f"{kernel.op}/{kernel.name}/{case.name}", kernel, case) for kernel, case in served] + unserved


def _captured(session: Session) -> list[Any]:
    bench = session.bench
    if bench is None:
        return [_skipped("none", 2, session.absence)]
    found = [(kernel, case) for kernel, case in session.admitted() if bench.can_capture(kernel, case)]
    why = f"no kernel is graph-safe on {bench.device.id}" if bench.capture else f"{bench.device.id} captures no graphs"
    return [_param(f"{kernel.op}/{kernel.name}/{case.name}", kernel, case) for kernel, case in found] or [_skipped("none", 2, why)]


def _reads_back(session: Session) -> list[Any]:
    if session.bench is None:
        return [_skipped("none", 3, session.absence)]
    return [_param(f"{write.name}+{attention.name}/{trip.name}", write, attention, trip)
            for write, attention, trip in session.round_trips()] or [_skipped("none", 3, "no kernels write and read one cache")]


@pytest.fixture(scope="session")
def bench(pytestconfig: pytest.Config) -> Iterator[Bench]:
    """The device that kernels are checked on."""
    found = pytestconfig.stash[_SESSION].bench
    assert found is not None, "without a device its tests are skipped"
    yield found
    found.release()


@pytest.fixture
def cases(pytestconfig: pytest.Config, kernel: Kernel) -> tuple[Any, ...]:
    """All cases of the kernel's op."""
    return pytestconfig.stash[_SESSION].cases(kernel)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note each test's kernels, before anything is deselected."""
    for item in items:
        values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        for kernel in values:
            if isinstance(kernel, Kernel):
                item.user_properties.append((_PROPERTY, kernel.name))
                config.stash[_TALLY].collected[kernel.name] += 1


class _Watch:
    """Counts how tests end."""

    def __init__(self, tally: _evidence.Tally) -> None:
        self._tally = tally

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's end; a failure at any stage."""
        for key, name in report.user_properties:
            if key != _PROPERTY:
                continue
            assert isinstance(name, str)
            self._tally.failed[name] += report.failed
            self._tally.ended[name] += report.when == "teardown"
            self._tally.passed[name] += report.when == "call" and report.passed
            if report.when == "call" and report.passed and "::test_agrees[" in report.nodeid:
                self._tally.executed.add(name)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start counting."""
    session.config.pluginmanager.register(_Watch(session.config.stash[_TALLY]))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the evidence, and say for which kernels there is none, and why."""
    path, session, tally = config.option.evidence, config.stash[_SESSION], config.stash[_TALLY]
    if path is None:
        return
    if session.device is None:
        terminalreporter.write_line(f"no evidence: {session.absence}")
        return
    lacking = {kernel.name: tally.lacks(kernel) for kernel in session.kernels}
    count = sum(not why for why in lacking.values())
    if count:
        _evidence.write(path, session, tally)
    terminalreporter.write_line(f"evidence for {count} of {len(lacking)} kernels{f': {path}' if count else ''}")
    for name, why in lacking.items():
        if why:
            terminalreporter.write_line(f"  none for {name}: {why}")
