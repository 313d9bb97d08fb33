"""The process that renders chat templates: a JSON object a line in, one a line out. Run by its path; imports nothing of ours.

What templates find here is what transformers gives them (``raise_exception``, ``strftime_now``, ``tojson``, loop controls, trimmed
blocks): https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
import sys
from typing import Any

CPU_SECONDS = 1.0
"""Processor time of one rendering; when it is over the kernel ends the process."""

MAX_MEMORY = 512 << 20
"""Address space of the process, in bytes."""

MAX_CHARACTERS = 16 << 20
"""Characters of a message, and of a rendered text."""


def serve() -> None:
    """Answer until the input ends."""
    limit_memory()
    templates: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        limit_time(CPU_SECONDS)
        try:
            answer = {"text": render(request["template"], request["variables"], templates)}
        except MemoryError:
            answer = {"error": f"it needs more than {MAX_MEMORY >> 20} MiB"}
        except RecursionError:
            answer = {"error": "it recurses without end"}
        except Exception as error:  # whatever a template raises is its answer
            answer = {"error": words(error)}
        limit_time(0.0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def render(source: str, variables: dict[str, Any], templates: dict[str, Any]) -> str:
    """The text of a template, compiled once."""
    if source not in templates:
        templates[source] = environment().from_string(source)
    parts = []
    left = MAX_CHARACTERS
    for part in templates[source].generate(**variables):
        left -= len(part)
        if left < 0:
            raise ValueError(f"it gives more than {MAX_CHARACTERS} characters")
        parts.append(part)
    return "".join(parts)


def environment() -> Any:
    """The sandbox, with what templates expect."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(str(message))

    def strftime_now(pattern: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(pattern)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    sandbox.filters["tojson"] = tojson
    sandbox.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return sandbox


def words(error: Exception) -> str:
    """What went wrong, with the template's line where it is known."""
    line = getattr(error, "lineno", None)
    text = str(error) or type(error).__name__
    return (f"line {line}: {text}" if line else text)[:500]


def limit_memory() -> None:
    """Hold the address space, where the system can."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    except (ImportError, ValueError, OSError):
        pass


def limit_time(seconds: float) -> None:
    """End this process after ``seconds`` of its processor time; 0 calls it off. No handler: a template cannot outwait it in C."""
    import signal

    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    sys.path[:] = sys.argv[1:]
    try:
        serve()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
