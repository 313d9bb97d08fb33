"""Graph capture: the native launches of a step, recorded and replayed in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fitment.graphs import CaptureError, Graph, GraphCapture
from fitment_cpu.kernels._launch import native


class CpuGraph(Graph):
    """A recorded step. The tape keeps the weights and the scratch memory that the launches refer to, ``tensors`` the rest."""

    def __init__(self, tape: native.Tape, tensors: Sequence[torch.Tensor]) -> None:
        self._tape = tape
        self._tensors = tuple(tensors)

    def replay(self) -> None:
        self._tape.replay()


class CpuGraphCapture(GraphCapture):
    """Runs the step once and records every launch; a torch operation in it, which no tape can see, is an error."""

    def capture(self, step: Callable[[], None]) -> Graph:
        if native.is_recording():
            raise CaptureError("this thread is capturing a step already; captures do not nest")
        tape, watch = native.Tape(), _Watch()
        native.record(tape)
        try:
            with watch:
                step()
        finally:
            native.stop()
        return CpuGraph(tape, watch.tensors)


class _Watch(TorchFunctionMode):
    """Lets through what only looks at tensors, in whatever shape, and refuses what computes, writes, allocates or reads values.

    ``tensors`` collects those whose addresses were taken: what launches refer to. A dispatch mode would see operations more directly,
    and costs most of a second when it is first entered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "data_ptr":
            self.tensors.append(args[0])
        writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITING or "out" in kwargs or kwargs.get("inplace")
        if writes or name in _READING:
            raise CaptureError(_refusal(name))
        result = func(*args, **kwargs)
        if not all(_is_view(value, args) for value in (result if isinstance(result, (tuple, list)) else (result,))):
            raise CaptureError(_refusal(name))
        return result


_WRITING = frozenset(("__set__", "__setitem__", "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__", "__ior__",
                      "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__"))
"""Functions that write and whose names do not end as those of others do: assignments and operators in place."""

_READING = frozenset(("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__bool__", "__int__", "__float__",
                      "__complex__", "__index__", "__contains__"))
"""Functions that give values as numbers: what a step makes of them, a replay cannot make again."""


def _refusal(name: str) -> str:
    return (f"the step calls torch's {name}, which is not recorded; a step that is captured calls bound ops alone, on buffers that were "
            "there before")


def _is_view(value: Any, args: Sequence[Any]) -> bool:
    """Whether ``value`` is no tensor, or one on the memory of a tensor among ``args``."""
    if not isinstance(value, torch.Tensor):
        return True
    memory = value.untyped_storage().data_ptr()
    return any(isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() == memory for arg in args)
