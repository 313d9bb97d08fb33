"""The null platform's graph capture: it keeps the step and runs it again."""

from __future__ import annotations

from collections.abc import Callable

from fitment.graphs import Graph, GraphCapture


class NullGraph(Graph):
    """A step that is kept."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def replay(self) -> None:
        self._step()


class NullGraphCapture(GraphCapture):
    """Runs the step once and keeps it."""

    def capture(self, step: Callable[[], None]) -> Graph:
        step()
        return NullGraph(step)
