"""The errors that a user of Fitment can cause; everything else that is raised is a defect."""

from __future__ import annotations

from collections.abc import Sequence


class FitmentError(Exception):
    """A problem whose message names the offender, the value found, what was wanted and what to do.

    Commands print the message alone, without a traceback, and exit with 1.
    """


class Problems(FitmentError):
    """Several problems found in one pass and reported together; ``problems`` holds a sentence for each."""

    def __init__(self, subject: str, problems: Sequence[str]) -> None:
        assert problems, "raise Problems only when there are any"
        self.subject = subject
        self.problems = tuple(problems)
        lines = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(f"{subject}: {len(problems)} problem{'s' if len(problems) > 1 else ''}{lines}")
