"""Graph capture: the native launches of a step, recorded and replayed in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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


class _OnlyViews(TorchFunctionMode):
    """Lets through what only looks at tensors, in whatever shape, and refuses what computes, writes or allocates.

    A dispatch mode would see more directly, and costs most of a second when it is first entered.
    """

    def __torch_function__(self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", str(func))
        writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITING or "out" in (kwargs or {})
        result = None if writes else func(*args, **(kwargs or {}))
        if writes or not all(_is_view(value, args) for value in (result if isinstance(result, (tuple, list)) else (result,))):
            raise CaptureError(f"the step calls torch's {name}, which is not recorded; a step that is captured calls bound ops alone, on "
                               "buffers that were there before")
        return result


_WRITING = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__set__"))


def _is_view(value: Any, args: Sequence[Any]) -> bool:
    """Whether ``value`` is no tensor, or one on the memory of a tensor among ``args``."""
    if not isinstance(value, torch.Tensor):
        return True
    memory = value.untyped_storage().data_ptr()
    return any(isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() == memory for arg in args)
