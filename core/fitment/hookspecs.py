"""The hooks of a platform plugin and of an engine plugin, a sentence each. What they return is checked when it is loaded.

A platform is a module named by an entry point in the group ``fitment.platforms``; the entry point's name is the platform's.
It has ``FITMENT_API``, the versions of this interface that it was written for (``">=1.0,<2"``), and these functions under
``@hookimpl``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pluggy

from fitment.conditions import Condition
from fitment.facts import FactKey
from fitment.hardware import Hardware, KVLayout, Listing
from fitment.kernels import Kernel

API_VERSION = "1.0"
hookspec = pluggy.HookspecMarker("fitment")
hookimpl = pluggy.HookimplMarker("fitment")


class PlatformHooks:
    """What a platform tells; every hook but devices, kernels and kv_layout is optional, and all are cheap and import no torch."""

    @hookspec(firstresult=True)
    def fitment_fact_keys(self) -> Iterable[FactKey]:  # type: ignore[empty-body]
        """Fact keys of its own, named ``PLATFORM.…``."""

    @hookspec(firstresult=True)
    def fitment_hardware(self) -> Iterable[Hardware]:  # type: ignore[empty-body]
        """The parts that it knows by name, live or not."""

    @hookspec(firstresult=True)
    def fitment_devices(self) -> Listing:  # type: ignore[empty-body]
        """The devices that are here, and why there are none or fewer than there could be."""

    @hookspec(firstresult=True)
    def fitment_kernels(self) -> Iterable[Kernel]:  # type: ignore[empty-body]
        """The kernels that it registers."""

    @hookspec(firstresult=True)
    def fitment_kv_layout(self) -> KVLayout:  # type: ignore[empty-body]
        """How it lays out the key-value cache."""

    @hookspec(firstresult=True)
    def fitment_abilities(self) -> dict[str, Condition]:  # type: ignore[empty-body]
        """What it can do beside kernels (names of ``fitment.features.ABILITIES``), each with the condition on device facts."""

    @hookspec(firstresult=True)
    def fitment_defaults(self) -> dict[str, tuple[str, ...]]:  # type: ignore[empty-body]
        """In which order to try what the operator leaves open: values for ``dtype``, ``activations`` and ``kv_dtype``."""

    @hookspec(firstresult=True)
    def fitment_graph_capture(self) -> str:  # type: ignore[empty-body]
        """``"module:Class"`` of its :class:`~fitment.graphs.GraphCapture`, for the ability ``graph_capture``."""


@dataclass(frozen=True)
class EngineInfo:
    """What an engine has: model architectures, features (names of ``fitment.features.FEATURES``) and activation dtypes."""

    name: str
    version: str
    architectures: tuple[str, ...]
    features: tuple[str, ...]
    rope_scalings: tuple[str, ...] = ()


class EngineHooks:
    """What an engine tells; entry-point group ``fitment.engines``."""

    @hookspec(firstresult=True)
    def fitment_engine(self) -> EngineInfo:  # type: ignore[empty-body]
        """Which architectures and features it has."""
