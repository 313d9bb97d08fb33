"""Facts: what is true of one device, its host, and what is asked of them, as a flat mapping from declared keys to values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from fitment.errors import Problems

Value = str | int | float | bool | frozenset[str]


class Kind(StrEnum):
    """Where a fact comes from, and so who can change it."""

    HARDWARE = "hardware"
    BUILD = "build"
    ENVIRONMENT = "environment"
    REQUEST = "request"

    @property
    def code(self) -> str:
        """The part of a reason's code that stands for this kind."""
        return {"hardware": "HW", "build": "BUILD", "environment": "ENV", "request": "REQ"}[self.value]


TYPES: Mapping[str, type] = MappingProxyType(
    {"str": str, "int": int, "float": float, "bool": bool, "set": frozenset, "version": str}
)


@dataclass(frozen=True)
class FactKey:
    """The declaration of one key: its type, unit, kind and one sentence.

    ``type`` is one of ``str int float bool set version``; a *set* is a ``frozenset[str]``, a *version* a string that
    ``packaging.version`` reads. ``remedy`` says what a user can do when the fact is not as wanted; it is empty for what nobody
    can change.
    """

    name: str
    type: str
    kind: Kind
    doc: str
    unit: str = ""
    remedy: str = ""

    def accepts(self, value: object) -> bool:
        """Whether ``value`` has this key's type; an int is no bool, and a float key takes ints."""
        wanted = TYPES[self.type]
        if wanted is float:
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        if wanted is int:
            return isinstance(value, int) and not isinstance(value, bool)
        if wanted is frozenset:
            return isinstance(value, frozenset) and all(isinstance(item, str) for item in value)
        return isinstance(value, wanted)


class Facts(Mapping[str, Value]):
    """An immutable, hashable mapping of facts; ``a | b`` lets ``b`` win."""

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[str, Value] = MappingProxyType({})) -> None:
        self._items: dict[str, Value] = dict(items)
        self._hash: int | None = None

    def __getitem__(self, key: str) -> Value:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __or__(self, other: Mapping[str, Value]) -> Facts:
        return Facts({**self._items, **other})

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._items.items()))
        return self._hash

    def __repr__(self) -> str:
        return f"Facts({self._items!r})"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict, keys sorted, sets as sorted lists."""
        return {key: to_json(self._items[key]) for key in sorted(self._items)}


def to_json(value: Value) -> Any:
    """A fact's value as JSON holds it: a set becomes a sorted list."""
    return sorted(value) if isinstance(value, frozenset) else value


def from_json(value: Any) -> Value:
    """The inverse of :func:`to_json`: a list becomes a set."""
    return frozenset(value) if isinstance(value, list) else value


class FactRegistry:
    """The declared keys: core's own and those that plugins declare under their prefix."""

    def __init__(self, keys: Iterable[FactKey] = ()) -> None:
        self._keys: dict[str, FactKey] = {}
        self.declare(CORE_KEYS, owner="")
        self.declare(keys, owner="")

    def declare(self, keys: Iterable[FactKey], owner: str) -> None:
        """Add ``keys``; an ``owner`` may only declare names under ``owner.``, and no key can be declared twice.

        Raises:
            Problems: every key that is wrong; nothing has been added then.
        """
        keys = tuple(keys)
        problems: list[str] = []
        known = dict(self._keys)
        for key in keys:
            if owner and not key.name.startswith(f"{owner}."):
                problems.append(f"fact key {key.name!r}: a plugin declares keys under its own prefix, {owner + '.'!r}")
            if key.name in known:
                problems.append(f"fact key {key.name!r} is declared already: {known[key.name].doc}")
            known[key.name] = key
            if key.type not in TYPES:
                problems.append(f"fact key {key.name!r}: type {key.type!r} is none of {', '.join(TYPES)}")
        if problems:
            raise Problems(f"fact keys of {owner or 'core'}", problems)
        self._keys = known

    def __getitem__(self, name: str) -> FactKey:
        return self._keys[name]

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def __iter__(self) -> Iterator[FactKey]:
        return iter(self._keys.values())

    def get(self, name: str) -> FactKey | None:
        """The declaration of ``name``, or None."""
        return self._keys.get(name)

    def problems(self, facts: Mapping[str, object]) -> list[str]:
        """A sentence for each fact whose key nobody declared or whose value has not the declared type."""
        found = []
        for name, value in facts.items():
            key = self._keys.get(name)
            if key is None:
                found.append(f"fact {name!r} is not declared; declare a FactKey for it or use a declared one")
            elif not key.accepts(value):
                found.append(f"fact {name!r} = {value!r} has type {type(value).__name__}, wanted {key.type}")
        return found


def _keys() -> Iterator[FactKey]:
    hw, env, req = Kind.HARDWARE, Kind.ENVIRONMENT, Kind.REQUEST
    yield FactKey("arch", "str", hw, "The architecture that kernels are compiled for, as its toolchain names it.")
    yield FactKey("arch_family", "str", hw, "The family of architectures that share an instruction set.")
    yield FactKey("vendor", "str", hw, "Who makes the device.")
    yield FactKey("compute_capability", "str", hw, "NVIDIA's major.minor; an identity, compared as a set, never as a floor.")
    yield FactKey("isa", "set", hw, "Instruction-set extensions that the device has, by the Linux kernel's names.")
    yield FactKey("dtypes", "set", hw, "Element types that the device's units multiply directly.")
    yield FactKey("cores", "int", hw, "Physical cores, or the device's nearest equivalent.", "cores")
    yield FactKey("cache_l1d_bytes", "int", hw, "Level-1 data cache of one core.", "bytes")
    yield FactKey("cache_l2_bytes", "int", hw, "Level-2 cache of one core.", "bytes")
    yield FactKey("cache_l3_bytes", "int", hw, "Last-level cache that cores share.", "bytes")
    yield FactKey("memory_bytes", "int", hw, "Memory that the device has.", "bytes")
    yield FactKey("memory_available_bytes", "int", env, "Memory that is free for use now.", "bytes",
                  remedy="free memory on the device, or raise the container's limit")
    yield FactKey("memory_bandwidth", "float", hw, "Peak memory bandwidth.", "bytes/s")
    yield FactKey("shared_memory_bytes", "int", hw, "Scratch memory that one work group can have.", "bytes")
    yield FactKey("subgroup_size", "int", hw, "Lanes that execute in lockstep.", "lanes")
    yield FactKey("driver", "version", env, "Version of the kernel-mode driver.", remedy="install or update the driver")
    yield FactKey("runtime", "version", env, "Version of the vendor's runtime (CUDA, ROCm, Level Zero).",
                  remedy="install a matching runtime")
    yield FactKey("torch", "version", env, "Version of torch.", remedy="pip install a torch version in this range")
    yield FactKey("triton", "version", env, "Version of Triton.", remedy="pip install a triton version in this range")
    yield FactKey("python", "version", env, "Version of Python.", remedy="use a Python version in this range")
    yield FactKey("glibc", "version", env, "Version of the C library.", remedy="use a distribution with this C library or newer")
    yield FactKey("os", "str", env, "Operating system, as sys.platform names it.", remedy="run on a supported operating system")
    yield FactKey("machine", "str", hw, "Host processor architecture, as platform.machine() names it.")
    yield FactKey("dtype", "str", req, "Element type of activations.", remedy="--dtype")
    yield FactKey("activations", "str", req, "How linear layers see their activations: as they are, or quantized.",
                  remedy="--activations")
    yield FactKey("kv_dtype", "str", req, "Element type of the key-value cache.", remedy="--kv-cache-dtype")
    yield FactKey("head_size", "int", req, "Elements of one attention head.", "elements")
    yield FactKey("query_per_kv", "int", req, "Query heads that share one key-value head.", "heads")
    yield FactKey("query_length", "int", req, "Longest run of query tokens of one sequence in a call.", "tokens")
    yield FactKey("block_size", "int", req, "Tokens in one block of the key-value cache.", "tokens")
    yield FactKey("rotary_size", "int", req, "Elements of a head that rotary embedding turns.", "elements")
    yield FactKey("vocab_size", "int", req, "Entries of the vocabulary.", "tokens")
    yield FactKey("weight.family", "str", req, "Weight family: dense, group_affine, group_codebook or scaled_float.")
    yield FactKey("weight.dtype", "str", req, "Element type of dense weights.")
    yield FactKey("weight.bits", "int", req, "Bits of one weight.", "bits")
    yield FactKey("weight.group_size", "int", req, "Weights that share a scale; 0 is a whole row.", "weights")
    yield FactKey("weight.offset", "str", req, "What a group's offset is: constant, zero_points or minimums.")
    yield FactKey("weight.scale_dtype", "str", req, "Element type of the group scales.")


CORE_KEYS: tuple[FactKey, ...] = tuple(_keys())
