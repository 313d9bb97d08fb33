"""The ``capabilities`` command: what runs where, why not, and what would. Exit status 0 yes, 1 no, 2 wrong usage."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from fitment.commands import exit_status
from fitment_matrix import __version__

COMMANDS = {
    "matrix": "every format and feature on all hardware that plugins know",
    "check": "can this model run here, or on hardware by name, as asked?",
    "plan": "how it would run: kernels, cache, memory",
    "explain": "why a format, encoding, feature or op runs on hardware as it does",
    "features": "what can be turned on, and where",
    "plugins": "what is installed, and what is broken",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    json = argparse.ArgumentParser(add_help=False)
    json.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON, with at least what the text says")
    main = argparse.ArgumentParser(prog="capabilities", description="What this machine can run. Without a command: an overview.",
                                   parents=[json])
    main.add_argument("--version", action="version", version=f"capabilities {__version__}")
    subparsers = main.add_subparsers(dest="command", metavar="COMMAND")
    for name, words in COMMANDS.items():
        command = import_module(f"{__name__}.{name}")
        command.add_arguments(subparsers.add_parser(name, help=words, description=command.__doc__, parents=[json]))
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = parser().parse_args(argv)
    arguments.json = getattr(arguments, "json", False)
    return exit_status("capabilities", lambda: import_module(f"{__name__}.{arguments.command or 'overview'}").run(arguments))
