"""Graph capture: a step recorded once and replayed without the host's work in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class Graph(ABC):
    """A captured step over fixed buffers."""

    @abstractmethod
    def replay(self) -> None:
        """Run the step again on what its buffers hold now; gives what the eager step would give, bit for bit."""


class GraphCapture(ABC):
    """A platform's way to capture a step."""

    @abstractmethod
    def capture(self, step: Callable[[], None]) -> Graph:
        """Run ``step`` and record it.

        ``step`` reads and writes fixed buffers, through bound ops alone; it may run more than once while it is captured. The
        graph keeps alive what it refers to.

        Raises:
            CaptureError: the step did something that cannot be replayed; the message names it.
        """


class CaptureError(RuntimeError):
    """A step that cannot be captured, and what in it cannot."""
