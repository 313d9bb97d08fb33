"""Graph capture: the native launches of a step, recorded and replayed in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fitment.graphs import CaptureError, Graph, GraphCapture
from fitment_cpu.kernels._launch import native


class CpuGraph(Graph):
    """A recorded step. It keeps the step, and with it the buffers that the launches refer to."""

    def __init__(self, tape: native.Tape, step: Callable[[], None]) -> None:
        self._tape = tape
        self._step = step

    def replay(self) -> None:
        self._tape.replay()


class CpuGraphCapture(GraphCapture):
    """Runs the step once and records every launch; a torch operation in it, which no tape can see, is an error."""

    def capture(self, step: Callable[[], None]) -> Graph:
        tape = native.Tape()
        native.record(tape)
        try:
            with _OnlyViews():
                step()
        finally:
            native.stop()
        return CpuGraph(tape, step)


class _OnlyViews(TorchDispatchMode):  # type: ignore[misc]
    """Lets operations through that only look at tensors in another way, and refuses those that compute."""

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        schema = func._schema
        is_view = bool(schema.returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
        if not is_view:
            raise CaptureError(f"the step calls torch's {func.name()}, which is not recorded; a step that is captured calls bound ops alone, "
                               "on buffers that were there before")
        return func(*args, **(kwargs or {}))
