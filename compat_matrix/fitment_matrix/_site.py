"""Where a request is to run: a device or a profile with its platform, and the engine that would run it."""

from __future__ import annotations

from collections.abc import Mapping

from fitment.conditions import Reason
from fitment.errors import FitmentError
from fitment.facts import Facts, Kind
from fitment.features import ABILITIES
from fitment.formats.base import TensorInfo
from fitment.hardware import Device, Hardware
from fitment.hookspecs import EngineInfo
from fitment.kernels import Selection, Verdict, select
from fitment.ops import Need
from fitment.plugins import DEFAULT_ORDERS, Platform, Registry
from fitment_matrix._inventory import Inventory
from fitment_matrix._request import OPEN, Request


class Site:
    """One place to run, with what its platform serves there; remembers selections, which many requests share."""

    def __init__(self, where: Device | Hardware, registry: Registry, engine: EngineInfo | None = None) -> None:
        if where.platform not in registry.platforms:
            raise FitmentError(f"{name_of(where)}: its platform {where.platform!r} is not installed; installed are "
                               f"{', '.join(registry.platforms) or 'none'}; see capabilities plugins")
        self.where = where
        self.registry = registry
        self.engine = engine
        self.platform: Platform = registry.platforms[where.platform]
        self._inventories: dict[tuple[int, bool], tuple[Mapping[str, TensorInfo], Inventory]] = {}
        self._known: dict[tuple[str, Facts, str | None], Selection] = {}

    def at(self, where: Device | Hardware) -> Site:
        """Another place for the same requests."""
        other = Site(where, self.registry, self.engine)
        other._inventories = self._inventories
        return other

    @property
    def name(self) -> str:
        """The device's id or the profile's name."""
        return name_of(self.where)

    def inventory(self, request: Request) -> Inventory:
        """The request's tensors by use; counted once for all requests over the same ones."""
        key = (id(request.tensors), request.model.tie_embeddings)
        if key not in self._inventories:  # with the mapping itself, so that its id stays its own
            self._inventories[key] = (request.tensors, Inventory(request.tensors, request.model.tie_embeddings))
        return self._inventories[key][1]

    def serve(self, need: Need, wanted: str | None = None) -> Selection:
        """The kernel for one need, with its trace.

        A call with a query length is served by one kernel for that length and for single tokens alike: a model binds one
        attention, which prefills, continues and decodes.
        """
        key = (need.op, need.facts, wanted)
        if key not in self._known:
            selection = self._select(need.op, need.facts, wanted)
            if need.facts.get("query_length", 1) != 1:
                selection = self._narrowed(selection, need.facts | {"query_length": 1})
            self._known[key] = selection
        return self._known[key]

    def _select(self, op: str, facts: Facts, wanted: str | None) -> Selection:
        return select(op, self.where.facts | facts, self.platform.kernels, self.registry.facts, wanted)

    def _narrowed(self, selection: Selection, facts: Facts) -> Selection:
        """``selection`` among the kernels that serve a call with ``facts`` too."""
        call = self.where.facts | facts
        verdicts = [Verdict(v.kernel, tuple(dict.fromkeys((*v.reasons, *v.kernel.condition.check(call, self.registry.facts)))))
                    for v in selection.trace]
        verdicts.sort(key=lambda verdict: not verdict.is_admitted)
        chosen = verdicts[0].kernel if verdicts and verdicts[0].is_admitted else None
        return Selection(selection.op, chosen, tuple(verdicts))

    def lacks(self, ability: str) -> tuple[Reason, ...]:
        """Why this place has not an ability of ``fitment.features.ABILITIES``; empty when it has."""
        condition = self.platform.abilities.get(ability)
        if condition is None:
            return (Reason("FIT-BUILD-ABILITY", Kind.BUILD, "platform", f"{ability}: {ABILITIES.get(ability, ability)}",
                           f"{self.platform.name}, which does not offer it"),)
        return condition.check(self.where.facts, self.registry.facts)

    def orders(self) -> dict[str, tuple[str, ...]]:
        """What to try for each option that is left open, in order; a cache type that the layout has not is no candidate."""
        orders = {name: tuple(self.platform.defaults.get(name, DEFAULT_ORDERS[name])) for name in OPEN}
        served = tuple(dtype for dtype in orders["kv_dtype"] if dtype in self.platform.kv_layout.dtypes)
        return {**orders, "kv_dtype": served or self.platform.kv_layout.dtypes}


def name_of(where: Device | Hardware) -> str:
    """The device's id or the profile's name."""
    return where.id if isinstance(where, Device) else where.name
