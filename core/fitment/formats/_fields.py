"""Typed access to a checkpoint's metadata: every wrong or missing field is noted, and all are reported together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fitment.description import ModelDescription, RopeScaling
from fitment.formats._files import shown

MAX_LAYERS = 10_000
MAX_HEADS = 1 << 16
MAX_SIZE = 1 << 24
MAX_VOCAB = 1 << 28
MAX_POSITION = 1 << 31

UNKNOWN = "?"
"""Stands for a text that is missing or wrong."""

_SCALE_RANGE = (1e-6, float(MAX_POSITION))
_REQUIRED = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The parameters that a kind of rotary scaling cannot do without; kinds that are not here are for others to refuse."""

KEYS = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_size", "vocab_size",
        "max_position", "rotary_size", "rms_norm_eps", "rope_theta")
"""The fields of a description that :func:`describe` takes from metadata."""


class Fields:
    """Reads typed values out of ``values`` and appends a sentence to ``problems`` for each that is missing or wrong.

    A wrong value comes back as a bound of its range, so that reading goes on and finds the rest.
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str]) -> None:
        self.values = values
        self.problems = problems
        self._bad: set[str] = set()

    def is_good(self, *keys: str) -> bool:
        """Whether none of ``keys`` has been found missing or wrong."""
        return self._bad.isdisjoint(keys)

    def contradiction(self, keys: tuple[str, ...], problem: str) -> None:
        """Note that the values of ``keys`` do not go together, unless one of them is already known to be wrong."""
        if self.is_good(*keys):
            self.problems.append(f"{', '.join(keys)}: {problem}")

    def get(self, key: str) -> Any:
        """The raw value, or None where it is absent or null."""
        return self.values.get(key)

    def _wrong(self, key: str, value: object, wanted: str) -> None:
        found = "is missing" if value is None else f"is {shown(value)}"
        self._bad.add(key)
        self.problems.append(f"{key} {found}, wanted {wanted}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An int in ``low..high``; floats and bools are refused."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self._wrong(key, value, f"an integer in {low}..{high}")
        return low

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number with ``low < value <= high``."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and low < value <= high:
            return float(value)
        self._wrong(key, value, f"a number above {low:g} and up to {high:g}")
        return high

    def flag(self, key: str, default: bool) -> bool:
        """A bool."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self._wrong(key, value, "true or false")
        return default

    def text(self, key: str, default: str | None = None) -> str:
        """A printable string, not empty and of at most 200 characters."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable():
            return value
        self._wrong(key, value, "a short printable string")
        return default or UNKNOWN

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids below ``vocab_size``, given as an int, a list of ints, or nothing."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size for item in ids):
            return tuple(ids)
        self._wrong(key, value, f"token ids in 0..{vocab_size - 1}")
        return ()


def describe(fields: Fields, keys: Mapping[str, str], *, defaults: Mapping[str, float], architecture: str,
             rotary_fraction: float = 1.0, rope_scaling: RopeScaling | None = None, tie_embeddings: bool = False,
             sliding_window: int | None = None, name: str = "") -> ModelDescription:
    """Build a description; what is wrong goes to ``fields.problems``, and its place in the result is filled with a bound.

    Args:
        fields: The metadata.
        keys: The metadata's key for each name of :data:`KEYS`; ``rotary_size`` may be left out.
        defaults: Values for the names that may be absent.
        rotary_fraction: The share of a head that is rotated, where no ``rotary_size`` says it.
        architecture, rope_scaling, tie_embeddings, sliding_window, name: As in the description.
    """
    def count(field: str, high: int, default: int | None = None) -> int:
        return fields.integer(keys[field], 1, high, default)

    hidden_size = count("hidden_size", MAX_SIZE)
    num_heads = count("num_heads", MAX_HEADS)
    num_kv_heads = count("num_kv_heads", MAX_HEADS, default=num_heads)
    head_size = count("head_size", MAX_HEADS, default=max(1, hidden_size // num_heads))
    rotary_size = max(1, int(head_size * rotary_fraction))
    if "rotary_size" in keys:
        rotary_size = count("rotary_size", MAX_HEADS, default=rotary_size)
    head_keys = (keys["head_size"],) if fields.get(keys["head_size"]) is not None else (keys["hidden_size"], keys["num_heads"])
    if len(head_keys) > 1 and hidden_size % num_heads:
        fields.contradiction(head_keys, f"{hidden_size} is not a multiple of {num_heads}, and {keys['head_size']} is missing")
    if num_heads % num_kv_heads:
        fields.contradiction((keys["num_heads"], keys["num_kv_heads"]), f"{num_heads} is not a multiple of {num_kv_heads}")
    if rotary_size > head_size or rotary_size % 2:
        fields.contradiction((*head_keys, *([keys["rotary_size"]] if "rotary_size" in keys else [])),
                             f"{rotary_size} elements of a head of {head_size} are rotated, wanted an even number of them")
    return ModelDescription(
        architecture=architecture, num_layers=count("num_layers", MAX_LAYERS), hidden_size=hidden_size,
        intermediate_size=count("intermediate_size", MAX_SIZE), num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_size=head_size, vocab_size=count("vocab_size", MAX_VOCAB), max_position=count("max_position", MAX_POSITION),
        rms_norm_eps=fields.number(keys["rms_norm_eps"], 0, 1, defaults.get("rms_norm_eps")),
        rope_theta=fields.number(keys["rope_theta"], 1, 1e30, defaults.get("rope_theta")),
        rotary_size=rotary_size, rope_scaling=rope_scaling, tie_embeddings=tie_embeddings, sliding_window=sliding_window,
        name=name)


def scaling(fields: Fields, kind: str, keys: Mapping[str, str]) -> RopeScaling:
    """Rotary scaling of ``kind``: the metadata's key for each parameter's name; one that is absent is left out.

    Numbers are held to a range in which no formula overflows; what is missing or wrong goes to ``fields.problems``.
    """
    parameters = {name: fields.number(key, *_SCALE_RANGE) for name, key in keys.items() if fields.get(key) is not None}
    for name in _REQUIRED.get(kind, ()):
        if name not in parameters:
            fields.problems.append(f"rotary scaling of type {kind!r} has no {name}")
    low, high = (parameters.get(f"{end}_freq_factor") for end in ("low", "high"))
    if low is not None and high is not None and low >= high:
        fields.problems.append(f"rotary scaling has low_freq_factor {low:g}, wanted less than high_freq_factor {high:g}")
    return RopeScaling(kind, parameters)
