"""From a plan to callables: ops are bound and weights are prepared once; afterwards nothing is selected or looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from fitment.formats import Checkpoint
from fitment.weights.dense import Dense
from fitment_matrix.gate import Plan

Progress = Callable[[int], None]
"""Called with the bytes (in the checkpoint) of each tensor that has been loaded."""


@dataclass(frozen=True)
class Linear:
    """Linear layers that read the same input, as few kernel calls as their weights' specs allow.

    ``parts`` holds, for each call, the columns of the output that it writes, the kernel and the prepared weight.
    """

    parts: tuple[tuple[int, int, Callable[..., None], Any], ...]

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out[n, rows]`` = x ``[n, cols]`` times the weights, one beside the other."""
        for start, stop, kernel, weight in self.parts:
            kernel(x, weight, out[:, start:stop])


class Binder:
    """Binds a plan's ops and prepares a checkpoint's weights for them.

    Each weight is read, prepared and released before the next one.
    """

    def __init__(self, plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        self.plan = plan
        self.device = torch.device(plan.device.torch_device if plan.device else "cpu")
        self._checkpoint = checkpoint
        self._progress = progress
        self._prepared: dict[tuple[str, str], Any] = {}

    def op(self, name: str) -> Callable[..., None]:
        """The kernel that the plan chose for an op without weights."""
        return self.plan.kernel(name).load()

    def vector(self, name: str) -> torch.Tensor:
        """A one-dimensional weight (a norm's) as fp32 on the device."""
        values: torch.Tensor = self._read([name]).dequantize(torch.float32)
        return values.to(self.device).contiguous()

    def linear(self, names: Sequence[str]) -> Linear:
        """The weights ``names``, which read one input; neighbours of one spec become one kernel call."""
        parts = []
        start = 0
        tensors = self._checkpoint.tensors
        for spec, group in groupby(names, key=lambda name: tensors[name].spec):
            members = list(group)
            rows = sum(tensors[name].shape[0] for name in members)
            kernel = self.plan.kernel("linear", spec)
            parts.append((start, start + rows, kernel.load(), self._prepare(members, kernel.prepare or "", kernel.load_prepare())))
            start += rows
        return Linear(tuple(parts))

    def embedding(self, name: str) -> tuple[Callable[..., None], Any]:
        """The embedding kernel and its prepared table; a tied output layer with the same ``prepare`` shares it."""
        kernel = self.plan.kernel("embedding", self._checkpoint.tensors[name].spec)
        return kernel.load(), self._prepare([name], kernel.prepare or "", kernel.load_prepare())

    def _prepare(self, names: list[str], prepare_entry: str, prepare: Callable[[Any], Any]) -> Any:
        key = (" ".join(names), prepare_entry)
        if key not in self._prepared:
            self._prepared[key] = prepare(self._read(names))
            for name in names:
                self._checkpoint.release(name)
        return self._prepared[key]

    def _read(self, names: Sequence[str]) -> Any:
        weights = [self._checkpoint.read(name) for name in names]
        if self._progress is not None:
            self._progress(sum(self._checkpoint.tensors[name].nbytes for name in names))
        if len(weights) == 1:
            return weights[0]
        return type(weights[0]).cat(weights)  # type: ignore[arg-type]

    def factors(self, name: str) -> list[float] | None:
        """The values of a small vector, or None when the checkpoint has no such tensor."""
        if name not in self._checkpoint.tensors:
            return None
        weight = self._read([name])
        assert isinstance(weight, Dense)
        values: list[float] = weight.dequantize().tolist()
        return values
