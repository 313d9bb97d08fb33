"""The ``fitment`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from fitment.commands import exit_status
from fitment.errors import FitmentError
from fitment_engine import __version__

COMMANDS = {"run": "answer a question, or chat", "generate": "continue many prompts from a file", "bench": "measure this machine"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="fitment", description="Run language models on whatever hardware fits.")
    parser.add_argument("--version", action="version", version=f"fitment {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, words in COMMANDS.items():
        command = import_module(f"fitment_engine.cli.{name}")
        command.add_arguments(subparsers.add_parser(name, help=words, description=command.__doc__))
    arguments = parser.parse_args(argv)
    refusals = (FitmentError, ImportError)  # a kernel of a plugin may need what is not there
    return exit_status("fitment", lambda: import_module(f"fitment_engine.cli.{arguments.command}").run(arguments), refusals)
