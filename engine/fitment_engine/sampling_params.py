"""How to sample: the parameters of a request, in the field's own names. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

from fitment.errors import Problems

MAX_LOGPROBS = 1000
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 4096
MAX_CONTINUATIONS = 1024


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request.

    Attributes:
        n: Continuations of the prompt.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Keep this many of the most probable tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of tokens whose probabilities reach this sum.
        min_p: Drop tokens less probable than this times the most probable one.
        repetition_penalty: Above 1 discourages tokens of the prompt and the output.
        presence_penalty: Taken from the logits of tokens that the output has.
        frequency_penalty: Taken from the logits of tokens once for each time that the output has them.
        seed: Repeats the tokens, whatever else is computed beside; None is another one each time.
        stop: Texts that end a continuation and are left out of it.
        stop_token_ids: Tokens that end a continuation, beside the model's own.
        include_stop_str_in_output: Keep the stop text.
        ignore_eos: Go on after the model's own end tokens.
        max_tokens: Most tokens of a continuation; None is up to the longest sequence.
        min_tokens: Tokens before any stop counts.
        logprobs: Give the log-probabilities of the chosen token and of this many of the best.
        prompt_logprobs: Likewise for the prompt's tokens.
        skip_special_tokens: Leave special tokens out of the text.

    Raises:
        Problems: every field that is wrong, with its value and what was wanted.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        problems = [problem for name, (kind, low, high, optional) in _NUMBERS.items()
                    if (problem := _number_problem(name, getattr(self, name), kind, low, high, optional))]
        problems += [f"{name} is {getattr(self, name)!r}, wanted true or false" for name in _FLAGS if type(getattr(self, name)) is not bool]
        problems += _stop_problems(self.stop)
        ids = self.stop_token_ids
        if ids is not None and (isinstance(ids, str) or not isinstance(ids, Sequence) or any(type(token) is not int for token in ids)):
            problems.append(f"stop_token_ids is {_shown(ids)}, wanted a list of token ids")
        if not problems and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            problems.append(f"min_tokens is {self.min_tokens}, wanted at most max_tokens, which is {self.max_tokens}")
        if problems:
            raise Problems("sampling parameters", problems)

    def to_dict(self) -> dict[str, Any]:
        """A dict of every field."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The parameters that ``values`` name.

        Raises:
            Problems: names that are no parameters, or values that are wrong.
        """
        names = [field.name for field in fields(cls)]
        problems = []
        for name in values:
            if name not in names:
                near = get_close_matches(str(name), names, n=1)
                problems.append(f"{_shown(name)} is no sampling parameter; " + (f"did you mean {near[0]}?" if near else
                                                                               f"there are {', '.join(names)}"))
        if problems:
            raise Problems("sampling parameters", problems)
        return cls(**values)


_INFINITY = math.inf
_NUMBERS: Mapping[str, tuple[type, float, float, bool]] = {
    "n": (int, 1, MAX_CONTINUATIONS, False),
    "temperature": (float, 0, 1e6, False),
    "top_k": (int, -1, 2**31 - 1, False),
    "top_p": (float, 1e-9, 1, False),
    "min_p": (float, 0, 1, False),
    "repetition_penalty": (float, 1e-6, 1e6, False),
    "presence_penalty": (float, -1e4, 1e4, False),
    "frequency_penalty": (float, -1e4, 1e4, False),
    "seed": (int, -(2**63), 2**64 - 1, True),
    "max_tokens": (int, 1, 2**31 - 1, True),
    "min_tokens": (int, 0, 2**31 - 1, False),
    "logprobs": (int, 0, MAX_LOGPROBS, True),
    "prompt_logprobs": (int, 0, MAX_LOGPROBS, True),
}
"""(type, least, most, whether None is allowed) of each number."""

_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


def _number_problem(name: str, value: Any, kind: type, low: float, high: float, optional: bool) -> str | None:
    if value is None and optional:
        return None
    fits = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    if fits and low <= value <= high:
        return None
    words = "a whole number" if kind is int else "a number"
    return f"{name} is {_shown(value)}, wanted {words} from {low:g} to {high:g}{' or None' if optional else ''}"


def _stop_problems(stop: Any) -> list[str]:
    if stop is None:
        return []
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or any(not isinstance(text, str) for text in texts):
        return [f"stop is {_shown(stop)}, wanted a text or a list of texts"]
    if len(texts) > MAX_STOP_STRINGS:
        return [f"stop has {len(texts)} texts, wanted at most {MAX_STOP_STRINGS}"]
    return [f"stop has {'an empty text' if not text else f'a text of {len(text)} characters'}, wanted 1 to {MAX_STOP_BYTES}"
            for text in texts if not 0 < len(text) <= MAX_STOP_BYTES]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
