"""Typed access to a checkpoint's metadata: every wrong or missing field is noted, and all are reported together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fitment.description import ModelDescription, RopeScaling
from fitment.formats._files import shown

MAX_LAYERS = 10_000
MAX_SIZE = 1 << 24
MAX_VOCAB = 1 << 28
MAX_POSITION = 1 << 31

KEYS = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_size", "vocab_size",
        "max_position", "rotary_size", "rms_norm_eps", "rope_theta")
"""The fields of a description that :func:`describe` takes from metadata."""


class Fields:
    """Reads typed values out of ``values`` and appends a sentence to ``problems`` for each that is missing or wrong.

    A wrong value comes back as its lower bound, so that reading goes on and finds the rest.
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str]) -> None:
        self.values = values
        self.problems = problems
        self._bad: set[str] = set()

    def is_good(self, *keys: str) -> bool:
        """Whether none of ``keys`` has been found missing or wrong, so that a check of one against another makes sense."""
        return self._bad.isdisjoint(keys)

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
        return default or "?"

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
    """Build a description; what is wrong goes to ``fields.problems`` and the result is then not to be used.

    Args:
        fields: The metadata.
        keys: The metadata's key for each name of :data:`KEYS`.
        defaults: Values for the names that may be absent.
        rotary_fraction: The share of a head that is rotated, where ``rotary_size`` is absent.
        architecture, rope_scaling, tie_embeddings, sliding_window, name: As in the description.
    """
    def count(field: str, high: int, default: int | None = None) -> int:
        return fields.integer(keys[field], 1, high, default)

    hidden_size = count("hidden_size", MAX_SIZE)
    num_heads = count("num_heads", 1 << 16)
    num_kv_heads = count("num_kv_heads", 1 << 16, default=num_heads)
    is_sound = fields.is_good(keys["hidden_size"], keys["num_heads"])
    if fields.get(keys["head_size"]) is None and hidden_size % num_heads and is_sound:
        fields.problems.append(f"{keys['hidden_size']} {hidden_size} is not a multiple of {keys['num_heads']} {num_heads}, "
                               f"and {keys['head_size']} is missing")
    if num_heads % num_kv_heads and fields.is_good(keys["num_heads"], keys["num_kv_heads"]):
        fields.problems.append(f"{keys['num_heads']} {num_heads} is not a multiple of {keys['num_kv_heads']} {num_kv_heads}")
    head_size = count("head_size", 1 << 16, default=max(1, hidden_size // num_heads))
    rotary_size = count("rotary_size", 1 << 16, default=int(head_size * rotary_fraction))
    is_sound = is_sound and fields.is_good(keys["head_size"], keys["rotary_size"])
    if is_sound and (rotary_size > head_size or rotary_size % 2 or not rotary_size):
        fields.problems.append(f"{keys['rotary_size']} {rotary_size} is not an even number in 2..{head_size}, the size of a head")
    return ModelDescription(
        architecture=architecture, num_layers=count("num_layers", MAX_LAYERS), hidden_size=hidden_size,
        intermediate_size=count("intermediate_size", MAX_SIZE), num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_size=head_size, vocab_size=count("vocab_size", MAX_VOCAB), max_position=count("max_position", MAX_POSITION),
        rms_norm_eps=fields.number(keys["rms_norm_eps"], 0, 1, defaults.get("rms_norm_eps")),
        rope_theta=fields.number(keys["rope_theta"], 0, 1e30, defaults.get("rope_theta")),
        rotary_size=rotary_size, rope_scaling=rope_scaling, tie_embeddings=tie_embeddings, sliding_window=sliding_window,
        name=name)
