"""Stop strings over streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for stop strings in text that comes in pieces, and holds back what could be the beginning of one.

    The stop that ends first wins; of those that end at the same place, the one that begins first. So what is found does not depend on
    how the text was cut.

    Args:
        stops: The stop strings, none empty.
        include: Whether the stop stays in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Take a piece of text.

        Returns:
            The text that is now certain, and the stop that was found, if any: nothing may be added after that.
        """
        self._held += text
        found = min(((at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None)
        if found is not None:
            end, start, stop = found
            text, self._held = self._held[: end if self._include else start], ""
            return text, stop
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, None

    def _overlap(self, stop: str) -> int:
        """The length of the longest beginning of ``stop`` that the held text ends with."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """The text that was held back; called when nothing more comes and no stop was found."""
        text, self._held = self._held, ""
        return text
