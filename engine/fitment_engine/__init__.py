"""An inference engine over Fitment's platforms.

>>> from fitment_engine import LLM, SamplingParams
>>> llm = LLM("smollm2-135m")
>>> [output] = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=32))
>>> output.outputs[0].text

This module imports no torch until ``LLM`` is asked for.
"""

from typing import TYPE_CHECKING, Any

from fitment_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fitment_engine.llm import LLM
    from fitment_engine.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_LAZY = {"LLM": "llm", "CompletionOutput": "outputs", "RequestOutput": "outputs"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
