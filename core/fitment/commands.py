"""How a command ends: its exit status, and what goes wrong as a message instead of a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from fitment.errors import FitmentError


def exit_status(program: str, command: Callable[[], int], refusals: tuple[type[Exception], ...] = (FitmentError,)) -> int:
    """Run a command.

    Args:
        program: The command's name, which begins its messages.
        command: Does the work, writes to standard output, and returns the exit status.
        refusals: The exceptions that are answers, not defects: their message is printed and the status is 1.

    Returns:
        The command's status; 1 after a refusal or when the output cannot be written, 130 when it was interrupted.
    """
    try:
        status = command()
        sys.stdout.flush()
        return status
    except refusals as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # of standard output: whatever else is read or written has errors of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that nothing more is tried at exit
        if not isinstance(error, BrokenPipeError):  # a reader who has seen enough needs no message
            print(f"{program}: the output cannot be written: {error}", file=sys.stderr)
        return 1
