"""Stop strings against a search over the whole text, however it was cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fitment_engine.stop_strings import StopMatcher

LETTERS = st.text("ab", min_size=0, max_size=12)


def searched(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop that ends first (of those, the one that begins first)."""
    ends = [(start + len(stop), start, stop) for stop in stops for start in range(len(text)) if text.startswith(stop, start)]
    if not ends:
        return text, None
    end, start, stop = min(ends)
    return text[: end if include else start], stop


@settings(max_examples=400, deadline=None)
@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans())
def test_cutting_the_text_changes_nothing(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher, given_out, found = StopMatcher(stops, include), "", None
    for piece in pieces:
        text, found = matcher.add(piece)
        given_out += text
        if found:
            break
    if not found:
        given_out += matcher.finish()
    assert (given_out, found) == searched("".join(pieces), stops, include)


@settings(max_examples=200, deadline=None)
@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_could_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher, given_out, seen = StopMatcher(stops, False), "", ""
    for piece in pieces:
        text, found = matcher.add(piece)
        if found:
            return
        given_out, seen = given_out + text, seen + piece
        held = seen[len(given_out):]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
