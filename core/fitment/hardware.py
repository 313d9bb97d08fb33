"""Hardware: named sets of facts that need no device; a Device is hardware found live."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitment.conditions import Reason
from fitment.errors import Problems
from fitment.facts import Facts, from_json


@dataclass(frozen=True)
class Hardware:
    """A part that a plugin knows by name, live or not; ``facts`` hold also what the published build brings for it."""

    name: str
    platform: str
    title: str
    facts: Facts
    source: str = ""


@dataclass(frozen=True)
class Device:
    """A device that is here.

    ``id`` is ``platform:index``; ``hardware`` the name of the profile that it matches best, or "" when none does;
    ``torch_device`` what ``torch.device()`` takes.
    """

    id: str
    platform: str
    hardware: str
    title: str
    facts: Facts
    torch_device: str = "cpu"


@dataclass(frozen=True)
class Listing:
    """What a platform found on this machine: its devices, and the reasons why there are none or fewer than there could be."""

    devices: tuple[Device, ...] = ()
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class KVLayout:
    """How a platform lays out the key-value cache.

    ``k_order`` and ``v_order`` permute ``("block", "slot", "head", "dim")``: the axes of the two cache tensors from the outermost
    in, where *block* counts ``num_blocks``, *slot* ``block_size`` tokens, *head* the key-value heads, *dim* the head's elements.
    ``dtypes`` are the cache element types that it serves.
    """

    name: str
    block_size: int
    k_order: tuple[str, ...]
    v_order: tuple[str, ...]
    dtypes: tuple[str, ...]

    def shape(self, order: Sequence[str], num_blocks: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """The shape of a cache tensor whose axes are in ``order``."""
        sizes = {"block": num_blocks, "slot": self.block_size, "head": num_kv_heads, "dim": head_size}
        return tuple(sizes[axis] for axis in order)

    def block_bytes(self, num_kv_heads: int, head_size: int, itemsize: int) -> int:
        """Bytes of one block of one layer, keys and values together."""
        return 2 * self.block_size * num_kv_heads * head_size * itemsize


AXES = frozenset(("block", "slot", "head", "dim"))
_ENTRIES = ("title", "source", "like", "facts")


def load_hardware(path: Path, platform: str) -> tuple[Hardware, ...]:
    """The profiles in a ``hardware.toml``.

    The file has an optional table ``[defaults]`` of facts that every profile gets, and a table ``[hardware.NAME]`` each with
    ``title``, ``source`` and ``facts``; a fact that is an array becomes a set. ``like = "OTHER"`` takes an earlier profile's
    facts.

    Raises:
        Problems: the profiles that lack something or have what nobody reads, all at once.
    """
    data: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    defaults = {key: from_json(value) for key, value in data.get("defaults", {}).items()}
    found: dict[str, Hardware] = {}
    problems = [f"{name!r} is neither [defaults] nor [hardware.NAME]" for name in data if name not in ("defaults", "hardware")]
    for name, entry in data.get("hardware", {}).items():
        problems += [f"hardware {name!r}: {key!r} is none of {', '.join(_ENTRIES)}" for key in entry if key not in _ENTRIES]
        like = entry.get("like")
        if like is not None and like not in found:
            problems.append(f"hardware {name!r}: like = {like!r} names no profile above it")
            continue
        missing = [key for key in ("title", "facts") if key not in entry]
        if missing:
            problems.append(f"hardware {name!r} lacks {', '.join(missing)}")
            continue
        own = {key: from_json(value) for key, value in entry["facts"].items()}
        base = dict(found[like].facts) if like else defaults
        found[name] = Hardware(name, platform, entry["title"], Facts({**base, **own}), entry.get("source", ""))
    if problems:
        raise Problems(str(path), problems)
    return tuple(found.values())
