"""Trying combinations of what is left open, and keeping the first that is served as fast as any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from fitment.kernels import GraphSafety, Kernel, Selection
from fitment.ops import Need
from fitment_matrix._request import OPEN
from fitment_matrix._site import Site

UNCAPTURED = frozenset(("sample",))
"""Ops outside the step that a graph captures."""


@dataclass(frozen=True)
class Choice:
    """Values of the options in ``OPEN``, in that order, as asked or as tried."""

    dtype: str
    activations: str
    kv_dtype: str


@dataclass(frozen=True)
class Trial:
    """One combination of the open options, and what serves each need under it."""

    choice: Choice
    selections: tuple[tuple[Need, Selection], ...]

    @property
    def is_served(self) -> bool:
        """Whether every need has a kernel."""
        return all(selection.chosen is not None for _, selection in self.selections)

    @property
    def kernels(self) -> list[Kernel]:
        """The chosen kernels."""
        return [selection.chosen for _, selection in self.selections if selection.chosen is not None]

    @property
    def speeds(self) -> list[int]:
        """The chosen kernels' speeds, slowest first: of two trials the slowest kernel decides, then the next."""
        return sorted(kernel.speed for kernel in self.kernels)

    @property
    def against(self) -> int:
        """How many different reasons there are against it."""
        return len({reason for _, selection in self.selections for reason in selection.reasons})

    def uncapturable(self) -> list[Kernel]:
        """The kernels of a step that no graph can hold."""
        return [selection.chosen for need, selection in self.selections
                if need.op not in UNCAPTURED and selection.chosen and selection.chosen.graph_safe is GraphSafety.NEVER]


def best_trial(site: Site, orders: Mapping[str, Iterable[str]], needs: Callable[[Choice], Iterable[Need]],
               wanted: Mapping[str, str] | None = None) -> Trial:
    """The first combination whose slowest kernels are as fast as any combination's.

    Args:
        site: Where.
        orders: For each option in ``OPEN`` the values to try, in order of preference.
        needs: The needs under a choice.
        wanted: Kernels by op that must be used.

    Returns:
        The best combination; where none is served, the first with the fewest reasons against it.
    """
    trials = []
    for combination in product(*(orders[name] for name in OPEN)):
        choice = Choice(*combination)
        trials.append(Trial(choice, tuple((need, site.serve(need, (wanted or {}).get(need.op))) for need in needs(choice))))
    served = [trial for trial in trials if trial.is_served]
    if not served:
        return min(trials, key=lambda trial: trial.against)
    fastest = max(trial.speeds for trial in served)
    return next(trial for trial in served if trial.speeds == fastest)
