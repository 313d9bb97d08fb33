"""The checks, each of which raises :class:`Nonconformance` with everything that is wrong."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fitment.conditions import Reason, from_dict
from fitment.conformance._buffers import Buffers
from fitment.facts import Facts, Value
from fitment.graphs import GraphCapture
from fitment.hardware import Device
from fitment.kernels import GraphSafety, Kernel, load_entry, missing_sources, select
from fitment.ops._cases._case import Call, Case, Expected
from fitment.ops._cases._compare import same_bits
from fitment.plugins import Platform, Registry
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine

SAFETY = (GraphSafety.NEVER, GraphSafety.SINGLE_TOKEN, GraphSafety.UNIFORM_BATCH, GraphSafety.ALWAYS)
"""Graph safety, the least first."""

Weight = Dense | GroupAffine
Bound = Callable[..., Any]


class Nonconformance(AssertionError):
    """A kernel does not do what its op's contract says; the message says on which call, and all that is wrong."""

    def __init__(self, subject: str, problems: Iterable[str]) -> None:
        super().__init__("".join((subject, *(f"\n  {problem}" for problem in problems))))


def report(subject: str, problems: Iterable[str]) -> None:
    """Raise :class:`Nonconformance` if there are problems."""
    problems = list(problems)
    if problems:
        raise Nonconformance(subject, problems)


@dataclass
class Bench:
    """One device of a platform, and what has been prepared on it."""

    platform: Platform
    registry: Registry
    device: Device
    _prepared: OrderedDict[tuple[str | None, int], tuple[Weight, Any]] = field(default_factory=OrderedDict, repr=False)
    _calls: OrderedDict[tuple[int, int], tuple[Case, Call, Mapping[str, Expected]]] = field(default_factory=OrderedDict, repr=False)

    @cached_property
    def torch_device(self) -> torch.device:
        """Where buffers are."""
        return torch.device(self.device.torch_device)

    @cached_property
    def capture(self) -> GraphCapture | None:
        """The platform's graph capture, where it has one on this device."""
        condition = self.platform.abilities.get("graph_capture")
        if condition is None or self.platform.graph_capture is None or condition.check(self.device.facts, self.registry.facts):
            return None
        capture: GraphCapture = load_entry(self.platform.graph_capture)()
        return capture

    def reasons(self, kernel: Kernel, facts: Mapping[str, Value]) -> tuple[Reason, ...]:
        """Why the kernel's condition does not admit a call with these facts on this device."""
        return kernel.condition.check(self.device.facts | facts, self.registry.facts)

    def can_capture(self, kernel: Kernel, case: Case) -> bool:
        """Whether a graph of the platform's can hold this call."""
        return self.capture is not None and SAFETY.index(kernel.graph_safe) >= SAFETY.index(case.batch)

    def call(self, case: Case, seed: int) -> tuple[Call, Mapping[str, Expected]]:
        """A case's arguments and what they must give; kept for the next kernel."""
        key = (id(case), seed)
        if key not in self._calls:
            call = case.build(seed)
            self._calls[key] = (case, call, case.expect(call))
            _shorten(self._calls, 4)
        _, call, expected = self._calls[key]
        return call, expected

    def weights(self, kernel: Kernel, call: Call) -> dict[str, Any]:
        """The call's weights as the kernel's ``prepare`` gives them; kept for the next case.

        Raises:
            Nonconformance: ``prepare`` changed what it was given.
        """
        return {name: self._prepare(kernel, weight) for name, weight in call.items() if isinstance(weight, Dense | GroupAffine)}

    def release(self) -> None:
        """Let go of everything that was prepared."""
        self._prepared.clear()
        self._calls.clear()

    def _prepare(self, kernel: Kernel, weight: Weight) -> Any:
        key = (kernel.prepare, id(weight))
        if key not in self._prepared:
            before = _snapshot(weight)
            self._prepared[key] = (weight, kernel.load_prepare()(weight))
            _shorten(self._prepared, 32)
            report(f"{kernel.name}: prepare", _changes(weight, before))
        return self._prepared[key][1]


def _shorten(kept: OrderedDict[Any, Any], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)


def _tensors(weight: Weight) -> dict[str, torch.Tensor]:
    if isinstance(weight, Dense):
        return {"values": weight.values}
    return {"codes": weight.codes, "scales": weight.scales} | ({"offset": weight.offset} if isinstance(weight.offset, torch.Tensor) else {})


def _snapshot(weight: Weight) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in _tensors(weight).items()}


def _changes(weight: Weight, before: dict[str, torch.Tensor]) -> Iterator[str]:
    for name, tensor in _tensors(weight).items():
        if not same_bits(tensor, before[name]).all():
            yield f"the weight's {name} were changed"
            tensor.copy_(before[name])


def check_agrees(bench: Bench, kernel: Kernel, case: Case) -> None:
    """The kernel computes the case, with packed and with strided rows, and touches nothing that it must not.

    Raises:
        Nonconformance: it does not.
    """
    call, expected = bench.call(case, 0)
    weights = bench.weights(kernel, call)
    given = {name: _snapshot(weight) for name, weight in call.items() if isinstance(weight, Dense | GroupAffine)}
    problems = []
    for words, is_strided in (("packed rows", False), ("strided rows", True)):
        buffers = Buffers(call, weights, bench.torch_device, is_strided)
        kernel.load()(*buffers.args)
        problems += [f"{words}: {problem}" for problem in (*_differences(buffers, expected), *buffers.problems())]
    for name, before in given.items():
        weight = call[name]
        assert isinstance(weight, Dense | GroupAffine)
        problems += _changes(weight, before)
    report(f"{kernel.name} on {case.name}", problems)


def _differences(buffers: Buffers, expected: Mapping[str, Expected]) -> Iterator[str]:
    outputs = buffers.outputs()
    assert outputs.keys() == expected.keys(), "a case says what must be in each output"
    for name, (got, before) in outputs.items():
        if problem := expected[name].problem(got, before):
            yield f"{name}: {problem}"


def check_captured(bench: Bench, kernel: Kernel, case: Case) -> None:
    """A graph of the call replays to what the eager call gives, bit for bit, also after its inputs have changed.

    Raises:
        Nonconformance: it does not.
    """
    assert bench.capture is not None, "the caller asks can_capture"
    calls = [bench.call(case, seed)[0] for seed in (0, 1)]
    weights, entry = bench.weights(kernel, calls[0]), kernel.load()
    eager = []
    for call in calls:
        buffers = Buffers(call, weights, bench.torch_device, is_strided=True)
        entry(*buffers.args)
        eager.append(buffers.outputs())
    buffers = Buffers(calls[0], weights, bench.torch_device, is_strided=True)
    graph = bench.capture.capture(lambda: entry(*buffers.args))
    problems: list[str] = []
    for words, i in (("changed inputs", 1), ("the first inputs again", 0)):
        buffers.load(calls[i])
        graph.replay()
        problems += [f"replay, {words}: {problem}" for problem in (*_bit_differences(buffers, eager[i]), *buffers.problems())]
    report(f"{kernel.name}, captured, on {case.name}", problems)


def _bit_differences(buffers: Buffers, eager: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Iterator[str]:
    for name, (got, _) in buffers.outputs().items():
        want = eager[name][0]
        differs = ~same_bits(got, want)
        if differs.any():
            at = tuple(differs.nonzero()[0].tolist())
            yield (f"{name}: {int(differs.sum())} of {got.numel()} elements are not the eager call's; the first, {list(at)}, is "
                   f"{float(got[at]):.9g}, wanted {float(want[at]):.9g}")


def check_refuses(bench: Bench, kernel: Kernel, cases: Iterable[Case]) -> None:
    """What the condition does not admit is refused with reasons, also by name: cases, other hardware, facts that are missing.

    Raises:
        Nonconformance: something is let through, or refused without a reason.
    """
    read_back = from_dict(kernel.condition.to_json())
    problems = []
    for label, facts in _calls_of(bench, kernel, list(cases)):
        reasons = kernel.condition.check(facts, bench.registry.facts)
        if read_back.check(facts, bench.registry.facts) != reasons:
            problems.append(f"{label}: the condition says something else when it is written as JSON and read back")
        selection = select(kernel.op, facts, bench.platform.kernels, bench.registry.facts, wanted=kernel.name)
        if reasons and selection.chosen is not None:
            problems.append(f"{label}: {selection.chosen.name} is chosen; {reasons[0].sentence()}")
        elif not reasons and selection.chosen != kernel:
            problems.append(f"{label}: is within the condition, and refused")
        if reasons and not selection.reasons:
            problems.append(f"{label}: is refused without a reason")
    report(f"{kernel.name}: refusals", problems)


def _calls_of(bench: Bench, kernel: Kernel, cases: list[Case]) -> Iterator[tuple[str, Facts]]:
    """The cases' facts here; those of one that is admitted on every other part, and without each key that the condition looks at."""
    for case in cases:
        yield case.name, bench.device.facts | case.facts
    inside = next((case for case in cases if not bench.reasons(kernel, case.facts)), None)
    if inside is not None:
        for hardware in bench.registry.hardware.values():
            yield f"{inside.name} on {hardware.name}", hardware.facts | inside.facts
        known = bench.device.facts | inside.facts
        for key in sorted(kernel.condition.keys()):
            yield f"{inside.name} without {key}", Facts({name: value for name, value in known.items() if name != key})


def check_sources(kernel: Kernel) -> None:
    """The files that the kernel names as its sources are there.

    Raises:
        Nonconformance: some are not; its evidence could not be dated.
    """
    report(f"{kernel.name}: sources", (f"{source!r} is not a file of the package {kernel.package!r}" for source in missing_sources(kernel)))
