"""Plugins: found by entry point, checked, and isolated: a broken one becomes a row that says what is wrong, and harms nobody."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import pluggy
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from fitment.conditions import AllOf, AnyOf, Condition, Reason, Test
from fitment.errors import FitmentError, Problems
from fitment.facts import FactKey, FactRegistry, Kind
from fitment.features import ABILITIES, FEATURES
from fitment.hardware import AXES, Device, Hardware, KVLayout, Listing
from fitment.hookspecs import API_VERSION, EngineHooks, EngineInfo, PlatformHooks
from fitment.kernels import Kernel
from fitment.ops import OPS
from fitment.weights.specs import ITEMSIZE

T = TypeVar("T")

PLATFORM_GROUP = "fitment.platforms"
ENGINE_GROUP = "fitment.engines"
EXTRA_VARIABLE = "FITMENT_PLUGINS"


@dataclass(frozen=True)
class Broken:
    """A plugin that is not used, and why: ``stage`` is where it failed (import, api, hooks, facts, hardware, kernels, …)."""

    name: str
    distribution: str
    stage: str
    problem: str


@dataclass(frozen=True)
class Platform:
    """A platform whose plugin loaded and passed every check. What is described here was asked for once."""

    name: str
    distribution: str
    version: str
    api: str
    hardware: tuple[Hardware, ...]
    kernels: tuple[Kernel, ...]
    kv_layout: KVLayout
    abilities: Mapping[str, Condition]
    defaults: Mapping[str, tuple[str, ...]]
    graph_capture: str | None
    list_devices: Callable[[], Listing] = field(repr=False, compare=False)

    @cached_property
    def listing(self) -> Listing:
        """The devices that are here; a plugin that fails to look is a reason, not an exception."""
        return self.list_devices()


class Registry:
    """Everything that is installed: platforms, engines, the plugins that are broken, and the declared fact keys."""

    def __init__(self) -> None:
        self.facts = FactRegistry()
        self.platforms: dict[str, Platform] = {}
        self.engines: dict[str, EngineInfo] = {}
        self.broken: list[Broken] = []

    @property
    def hardware(self) -> dict[str, Hardware]:
        """Every profile by name, in the order of platforms."""
        return {hw.name: hw for platform in self.platforms.values() for hw in platform.hardware}

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device that is here."""
        return tuple(device for platform in self.platforms.values() for device in platform.listing.devices)


class _Rejected(Exception):
    def __init__(self, stage: str, problem: str) -> None:
        super().__init__(problem)
        self.stage = stage


def load(extra: Mapping[str, str] | None = None) -> Registry:
    """Load every plugin that is installed.

    Args:
        extra: More platforms, ``{name: module}``, beside the installed ones; as does the environment variable
            ``FITMENT_PLUGINS="name=module,…"``, for a plugin that is being written.

    Returns:
        What loaded, and a row for each plugin that did not. No plugin's failure is raised.
    """
    registry = Registry()
    for name, distribution, version, importer in _found(PLATFORM_GROUP, {**_from_environment(), **(extra or {})}):
        try:
            platform = _load_platform(name, distribution, version, importer, registry)
            registry.platforms[platform.name] = platform
        except _Rejected as rejected:
            registry.broken.append(Broken(name, distribution, rejected.stage, str(rejected)))
    for name, distribution, _version, importer in _found(ENGINE_GROUP, {}):
        try:
            registry.engines[name] = _load_engine(importer)
        except _Rejected as rejected:
            registry.broken.append(Broken(name, distribution, rejected.stage, str(rejected)))
    return registry


def _from_environment() -> dict[str, str]:
    """The plugins that ``FITMENT_PLUGINS`` names."""
    found = {}
    for item in filter(None, os.environ.get(EXTRA_VARIABLE, "").split(",")):
        name, separator, module = item.strip().partition("=")
        if not (name and separator and module):
            raise FitmentError(f"{EXTRA_VARIABLE}: {item!r} is not name=module, such as acme=acme_fitment.plugin")
        found[name] = module
    return found


def _found(group: str, extra: Mapping[str, str]) -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    """Name, distribution, version and importer of each plugin; the first of two with one name counts."""
    seen = set(extra)
    for name, module in extra.items():
        yield name, EXTRA_VARIABLE, "", lambda module=module: import_module(module)  # type: ignore[misc]
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        if point.name not in seen:
            seen.add(point.name)
            yield point.name, point.dist.name if point.dist else "", point.dist.version if point.dist else "", _loader(point)


def _loader(point: EntryPoint) -> Callable[[], Any]:
    return lambda: point.load()


def _guard(stage: str, call: Callable[[], T]) -> T:
    """``call()``; whatever it raises, SystemExit included, becomes a rejection at ``stage``."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except _Rejected:
        raise
    except BaseException as error:
        words = str(error).strip() or "no message"
        raise _Rejected(stage, words if isinstance(error, FitmentError) else f"{type(error).__name__}: {words}") from error


def _manager(importer: Callable[[], Any], hooks: type) -> tuple[pluggy.PluginManager, str]:
    """A manager with this one plugin, and the API versions it states. One manager a plugin: isolation by construction."""
    module = _guard("import", importer)
    stated = getattr(module, "FITMENT_API", None)
    if not isinstance(stated, str):
        raise _Rejected("api", f"FITMENT_API is {stated!r}; state the versions it was written for, such as '>=1.0,<2'")
    try:
        fits = Version(API_VERSION) in SpecifierSet(stated)
    except InvalidSpecifier:
        raise _Rejected("api", f"FITMENT_API = {stated!r} is not a version specifier such as '>=1.0,<2'") from None
    if not fits:
        raise _Rejected("api", f"built for API {stated}, this is {API_VERSION}; install a version of the plugin that fits")
    manager = pluggy.PluginManager("fitment")
    manager.add_hookspecs(hooks)
    _guard("hooks", lambda: manager.register(module))
    _guard("hooks", manager.check_pending)
    return manager, stated


def _call(manager: pluggy.PluginManager, hook: str, wanted: type[T], is_required: bool = False) -> T:
    """One hook's result, which must be a ``wanted``; an optional hook that is absent gives an empty one."""
    caller = getattr(manager.hook, hook)
    if not caller.get_hookimpls():
        if is_required:
            raise _Rejected("hooks", f"{hook} is missing; every plugin implements it")
        return wanted()
    result = _guard(hook, caller)
    if not isinstance(result, wanted):
        raise _Rejected(hook, f"{hook} returned {result!r} ({type(result).__name__}), wanted {wanted.__name__}")
    return result


def _items(manager: pluggy.PluginManager, hook: str, wanted: type[T], is_required: bool = False) -> tuple[T, ...]:
    """One hook's result, which must be an iterable of ``wanted``."""
    caller = getattr(manager.hook, hook)
    if not caller.get_hookimpls():
        if is_required:
            raise _Rejected("hooks", f"{hook} is missing; every platform implements it")
        return ()
    result = _guard(hook, caller)
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes)):
        raise _Rejected(hook, f"{hook} returned {result!r} ({type(result).__name__}), wanted an iterable of {wanted.__name__}")
    items = _guard(hook, lambda: tuple(result))
    wrong = [item for item in items if not isinstance(item, wanted)]
    if wrong:
        raise _Rejected(hook, f"{hook} returned {wrong[0]!r} ({type(wrong[0]).__name__}), wanted {wanted.__name__}")
    return items


def _load_platform(name: str, distribution: str, version: str, importer: Callable[[], Any], registry: Registry) -> Platform:
    manager, api = _manager(importer, PlatformHooks)
    keys = _items(manager, "fitment_fact_keys", FactKey)
    facts = FactRegistry()
    _guard("fact keys", lambda: facts.declare(keys, owner=name))
    hardware = _items(manager, "fitment_hardware", Hardware)
    kernels = _items(manager, "fitment_kernels", Kernel, is_required=True)
    layout = _call(manager, "fitment_kv_layout", KVLayout, is_required=True)
    abilities = _call(manager, "fitment_abilities", dict)
    defaults = _call(manager, "fitment_defaults", dict)
    graph_capture = _call(manager, "fitment_graph_capture", str) or None
    if not manager.hook.fitment_devices.get_hookimpls():
        raise _Rejected("hooks", "fitment_devices is missing; every platform implements it")
    problems = _guard("declarations", lambda: [
        *_hardware_problems(name, hardware, facts, registry),
        *_kernel_problems(kernels, facts),
        *_layout_problems(layout),
        *_ability_problems(abilities, graph_capture, facts),
        *_default_problems(defaults),
    ])
    if problems:
        raise _Rejected("declarations", str(Problems(f"platform {name}", problems)))
    registry.facts.declare(keys, owner=name)
    return Platform(name, distribution, version, api, hardware, kernels, layout, abilities, defaults, graph_capture,
                    lambda: _list_devices(name, manager, facts))


def _load_engine(importer: Callable[[], Any]) -> EngineInfo:
    manager, _api = _manager(importer, EngineHooks)
    engine = _call(manager, "fitment_engine", EngineInfo, is_required=True)
    unknown = _guard("declarations", lambda: [feature for feature in engine.features if feature not in FEATURES])
    if unknown:
        raise _Rejected("declarations", f"features {', '.join(map(repr, unknown))} are none of {', '.join(FEATURES)}")
    return engine


def _list_devices(name: str, manager: pluggy.PluginManager, facts: FactRegistry) -> Listing:
    try:
        listing = _call(manager, "fitment_devices", Listing)
        problems = _guard("fitment_devices", lambda: list(_device_problems(name, listing, facts)))
        if problems:
            raise _Rejected("fitment_devices", str(Problems(f"devices of {name}", problems)))
        return listing
    except _Rejected as rejected:
        reason = Reason("FIT-ENV-DEVICES", Kind.ENVIRONMENT, "devices", f"a device listing from {name}", str(rejected),
                        f"capabilities plugins {name}")
        return Listing((), (reason,))


def _device_problems(name: str, listing: Listing, facts: FactRegistry) -> Iterator[str]:
    for device in listing.devices:
        if not device.id.startswith(f"{name}:"):
            yield f"{device.id}: its id does not start with {name + ':'!r}"
        if device.platform != name:
            yield f"{device.id} says platform {device.platform!r}, wanted {name!r}"
        for problem in facts.problems(device.facts):
            yield f"{device.id}: {problem}"


def _tests(condition: Condition) -> Iterator[Test]:
    if isinstance(condition, (AllOf, AnyOf)):
        for part in condition.parts:
            yield from _tests(part)
    elif isinstance(condition, Test):
        yield condition


_OPERATORS = {"is_in": ("str", "int", "bool", "version"), "at_least": ("int", "float"), "at_most": ("int", "float"),
              "multiple_of": ("int",), "has": ("set",), "version": ("version",)}


def _condition_problems(owner: str, condition: object, facts: FactRegistry) -> Iterator[str]:
    if not isinstance(condition, Condition):
        yield f"{owner}: condition {condition!r} is no Condition"
        return
    for test in _tests(condition):
        key = facts.get(test.key)
        if key is None:
            yield f"{owner}: its condition looks at fact {test.key!r}, which nobody declared; declare a FactKey for it"
        elif key.type not in _OPERATORS.get(test.operator, ()):
            yield f"{owner}: {test.operator} does not apply to fact {test.key!r}, which is a {key.type}"
        elif test.operator in ("at_least", "at_most", "multiple_of") and not isinstance(test.wanted, (int, float)):
            yield f"{owner}: {test.operator} compares fact {test.key!r} with {test.wanted!r}, which is no number"
        elif test.operator == "is_in":
            assert isinstance(test.wanted, frozenset)
            wrong = [value for value in test.wanted if not key.accepts(value)]
            if wrong:
                yield f"{owner}: {wrong[0]!r} can never be fact {test.key!r}, which is a {key.type}"


def _hardware_problems(name: str, hardware: tuple[Hardware, ...], facts: FactRegistry, registry: Registry) -> Iterator[str]:
    taken = registry.hardware
    for part in hardware:
        if part.platform != name:
            yield f"hardware {part.name!r} says platform {part.platform!r}, wanted {name!r}"
        if part.name in taken:
            yield f"hardware {part.name!r} is named by platform {taken[part.name].platform!r} already"
        taken[part.name] = part
        for problem in facts.problems(part.facts):
            yield f"hardware {part.name!r}: {problem}"


def _kernel_problems(kernels: tuple[Kernel, ...], facts: FactRegistry) -> Iterator[str]:
    names: set[str] = set()
    for kernel in kernels:
        owner = f"kernel {kernel.name!r}"
        if kernel.name in names:
            yield f"{owner} is registered twice"
        names.add(kernel.name)
        if kernel.op not in OPS:
            yield f"{owner}: op {kernel.op!r} has no contract; ops are {', '.join(OPS)}"
        for entry in (kernel.entry,) if kernel.prepare is None else (kernel.entry, kernel.prepare):
            if not _is_entry(entry):
                yield f"{owner}: entry {entry!r} is not 'module:function'"
        yield from _condition_problems(owner, kernel.condition, facts)


def _is_entry(entry: str) -> bool:
    module, _, attribute = entry.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), attribute))


def _layout_problems(layout: KVLayout) -> Iterator[str]:
    if layout.block_size < 1:
        yield f"KV layout {layout.name!r}: block_size {layout.block_size} is not positive"
    for order in (layout.k_order, layout.v_order):
        if frozenset(order) != AXES or len(order) != len(AXES):
            yield f"KV layout {layout.name!r}: order {order!r} is no permutation of {', '.join(sorted(AXES))}"
    for dtype in layout.dtypes:
        if dtype not in ITEMSIZE:
            yield f"KV layout {layout.name!r}: dtype {dtype!r} is none of {', '.join(ITEMSIZE)}"


def _ability_problems(abilities: Mapping[str, Condition], graph_capture: str | None, facts: FactRegistry) -> Iterator[str]:
    for ability, condition in abilities.items():
        if ability not in ABILITIES:
            yield f"ability {ability!r} is none of {', '.join(ABILITIES)}"
        yield from _condition_problems(f"ability {ability!r}", condition, facts)
    if "graph_capture" in abilities and graph_capture is None:
        yield "ability 'graph_capture' is declared, and fitment_graph_capture names no class"
    if graph_capture is not None and not _is_entry(graph_capture):
        yield f"fitment_graph_capture: {graph_capture!r} is not 'module:Class'"


DEFAULT_ORDERS: Mapping[str, tuple[str, ...]] = {"dtype": ("bf16", "fp16", "fp32"), "activations": ("bf16", "fp16", "fp32"),
                                                 "kv_dtype": ("bf16", "fp16", "fp32")}
"""What is tried, in order, where neither the operator nor the platform says."""


def _default_problems(defaults: Mapping[str, object]) -> Iterator[str]:
    for key, values in defaults.items():
        if key not in DEFAULT_ORDERS:
            yield f"default {key!r} is none of {', '.join(DEFAULT_ORDERS)}"
        elif not isinstance(values, tuple) or not values or not all(value in ITEMSIZE for value in values):
            yield f"default {key!r}: {values!r} is no tuple of dtypes ({', '.join(ITEMSIZE)})"
