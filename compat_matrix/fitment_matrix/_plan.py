"""What the gate decides: everything that an engine needs to start, and nothing that it has to choose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fitment.hardware import Device, Hardware, KVLayout
from fitment.kernels import Kernel, Selection, Speed, Verdict
from fitment.ops import Need
from fitment.plugins import Platform
from fitment.weights.specs import WeightSpec
from fitment_matrix._request import Request


@dataclass(frozen=True)
class Binding:
    """One op of the model, the facts of its call, and the kernel that serves it with every other kernel's verdict."""

    op: str
    need: Need
    selection: Selection

    @property
    def kernel(self) -> Kernel:
        """The chosen kernel; a plan has no binding without one."""
        assert self.selection.chosen is not None
        return self.selection.chosen

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict with the trace."""
        kernel = self.kernel
        return {"op": self.op, "label": self.need.label, "kernel": kernel.name, "speed": kernel.speed.name.lower(),
                "entry": kernel.entry, "prepare": kernel.prepare, "graph_safe": kernel.graph_safe.value,
                "facts": self.need.facts.to_json(),
                "passed_by": [verdict_json(verdict) for verdict in self.selection.trace if verdict.kernel is not kernel]}


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON holds it."""
    return {"kernel": verdict.kernel.name, "speed": verdict.kernel.speed.name.lower(),
            "reasons": [reason.to_json() for reason in verdict.reasons]}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a plan takes, and the bytes that may be used; ``usable`` is None where the hardware's memory is not known."""

    weights: int
    cache: int
    work: int
    usable: int | None

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.work

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {"weights": self.weights, "cache": self.cache, "work": self.work, "total": self.total, "usable": self.usable}


@dataclass(frozen=True)
class Plan:
    """A request that is admitted.

    Attributes:
        request: What was asked.
        device: The device that is here; None when the plan is for a profile.
        hardware: The profile; None when the device matches none.
        platform: Whose kernels these are.
        dtype, activations, kv_dtype: As asked or chosen.
        bindings: Every op of the model, linear layers first, then in the order of a step.
        kv_layout: The platform's.
        num_blocks: Blocks of the cache, each for all layers.
        max_model_len, max_num_seqs, max_batch_tokens: As asked or chosen.
        memory: What it takes.
        graph_batch_sizes: Batch sizes of decode steps to capture, ascending; empty without graphs.
        features: Those that the operator insisted on.
        choices: What the plan chose by itself, as sentences.
    """

    request: Request
    device: Device | None
    hardware: Hardware | None
    platform: Platform
    dtype: str
    activations: str
    kv_dtype: str
    bindings: tuple[Binding, ...]
    kv_layout: KVLayout
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_batch_tokens: int
    memory: MemoryEstimate
    graph_batch_sizes: tuple[int, ...]
    features: tuple[str, ...]
    choices: tuple[str, ...]

    def kernel(self, op: str, spec: WeightSpec | None = None) -> Kernel:
        """The kernel for an op; for ops that take weights, ``spec`` says of which.

        Raises:
            LookupError: the model that was planned has no such op or no such weight.
        """
        wanted: Mapping[str, Any] = spec.facts() if spec else {}
        for binding in self.bindings:
            if binding.op == op and wanted.items() <= binding.need.facts.items():
                return binding.kernel
        raise LookupError(f"plan for {self.where}: no kernel for {op}{f' with {spec}' if spec else ''} was planned")

    @property
    def place(self) -> Device | Hardware:
        """The device, or the profile."""
        place = self.device or self.hardware
        assert place is not None, "a plan is for one of the two"
        return place

    @property
    def where(self) -> str:
        """The device's id, or the profile's name."""
        return self.place.id if isinstance(self.place, Device) else self.place.name

    def weights(self) -> tuple[str, ...]:
        """``Q4_1 → GroupAffine 4-bit, …`` for each encoding of the model's matrices, in the order of the file."""
        seen = {info.encoding: info.spec for info in self.request.tensors.values() if len(info.shape) == 2}
        return tuple(f"{encoding} → {spec}" for encoding, spec in seen.items())

    def linear_speed(self) -> Speed:
        """The slowest linear layer's."""
        return min((binding.kernel.speed for binding in self.bindings if binding.op == "linear"), default=Speed.REFERENCE)

    def summary(self) -> str:
        """What one gets, in a line: linear layers' speed, the longest sequence, the cache's type, graphs."""
        graphs = "graphs" if self.graph_batch_sizes else "no graphs"
        return (f"{self.request.format} {self.linear_speed().name.lower()}, {self.max_model_len} tokens, "
                f"{self.kv_dtype} cache, {graphs}")

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that stand for all of the plan."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict of everything."""
        return {
            "request": self.request.to_json(),
            "device": self.device.id if self.device else None,
            "hardware": self.hardware.name if self.hardware else None,
            "platform": self.platform.name,
            "dtype": self.dtype,
            "activations": self.activations,
            "kv_dtype": self.kv_dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_batch_tokens": self.max_batch_tokens,
            "kv_layout": {"name": self.kv_layout.name, "block_size": self.kv_layout.block_size},
            "num_blocks": self.num_blocks,
            "memory": self.memory.to_json(),
            "graph_batch_sizes": list(self.graph_batch_sizes),
            "features": list(self.features),
            "choices": list(self.choices),
            "bindings": [binding.to_json() for binding in self.bindings],
        }
