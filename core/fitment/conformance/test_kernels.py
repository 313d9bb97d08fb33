"""Each kernel against the contract of its op."""

from __future__ import annotations

from fitment.conformance._round_trip import RoundTrip, check_reads_back
from fitment.conformance.checks import Bench, check_agrees, check_captured, check_refuses, check_sources
from fitment.kernels import Kernel
from fitment.ops._cases._case import Case


def test_sources(kernel: Kernel) -> None:
    """The files that date the kernel's evidence are there."""
    check_sources(kernel)


def test_refuses(bench: Bench, kernel: Kernel, cases: tuple[Case, ...]) -> None:
    """What lies outside its condition is refused with reasons."""
    check_refuses(bench, kernel, cases)


def test_agrees(bench: Bench, kernel: Kernel, case: Case) -> None:
    """It computes the case, and touches nothing that it must not."""
    check_agrees(bench, kernel, case)


def test_captured(bench: Bench, kernel: Kernel, case: Case) -> None:
    """A graph of it replays to the bits of the eager call, also after its inputs have changed."""
    check_captured(bench, kernel, case)


def test_reads_back(bench: Bench, write: Kernel, attention: Kernel, trip: RoundTrip) -> None:
    """What one kernel writes into the cache another reads."""
    check_reads_back(bench, write, attention, trip)
