"""Chat templates: a checkpoint's own Jinja, rendered where it can do no harm.

A template comes with a model and is a stranger's program. It runs in Jinja's sandbox, in a process of its own with limits on processor
time, memory and output (:mod:`fitment_engine._chat_worker`); what exceeds them ends that process and becomes an error here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fitment.errors import FitmentError, Problems
from fitment_engine._chat_worker import CPU_SECONDS, MAX_CHARACTERS
from fitment_engine.tokenizer import Tokenizer

_WORKER = Path(__file__).with_name("_chat_worker.py")
_PATIENCE = 30.0
"""Seconds of waiting after which a worker that neither answers nor hits its limit is ended: the machine is busy, or it waits forever."""


class ChatTemplate:
    """One template and the process that renders it, which starts at once and lives until this object goes."""

    def __init__(self, template: str | None, bos_token: str = "", eos_token: str = "") -> None:
        self._template = template
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._worker: subprocess.Popen[str] | None = None
        if template is not None:
            self._start()

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, template: str | None = None) -> ChatTemplate:
        """``template``, or the checkpoint's own, with the tokenizer's start and end tokens."""
        return cls(tokenizer.chat_template if template is None else template, tokenizer.bos_token, tokenizer.eos_token)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation.

        Args:
            messages: Each with ``role`` and ``content``: a text, or a list of ``{"type": "text", "text": …}``.
            add_generation_prompt: Whether to end with the beginning of the assistant's turn.
            variables: More variables for the template.

        Raises:
            FitmentError: there is no template, it refused the messages, it is wrong, or it went beyond its limits.
            Problems: every message that is wrong.
        """
        if self._template is None:
            raise FitmentError("chat template: the checkpoint has none; give one with --chat-template FILE (chat_template= in Python), "
                               "or continue plain text (--raw; generate() in Python)")
        request = {"template": self._template, "variables": {**variables, **self._tokens, "messages": checked(messages),
                                                             "add_generation_prompt": add_generation_prompt}}
        try:
            line = json.dumps(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise FitmentError(f"chat template: the messages are not plain data: {error}") from error
        answer = self._ask(line)
        if "error" in answer:
            raise FitmentError(f"chat template: {answer['error']}")
        return str(answer["text"])

    def _start(self) -> subprocess.Popen[str]:
        self._worker = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WORKER), *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, encoding="utf-8", process_group=0)  # a terminal's Ctrl-C is for the answer
        self._finalizer = weakref.finalize(self, _end, self._worker)
        return self._worker

    def _ask(self, line: str) -> dict[str, Any]:
        """Send a line and get a line; a worker that ends instead is told apart by how it ended."""
        worker = self._worker
        if worker is None or worker.poll() is not None:
            worker = self._start()
        assert worker.stdin is not None and worker.stdout is not None
        timer = threading.Timer(_PATIENCE, worker.kill)
        timer.start()
        try:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer.endswith("\n"):
            self._finalizer()
            raise FitmentError(f"chat template: it was ended, as it used more than {CPU_SECONDS} s of processor time or too much memory; "
                               "give another one with --chat-template FILE")
        found: dict[str, Any] = json.loads(answer)
        return found


def _end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        _close(pipe)


def _close(pipe: IO[str] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except OSError:
        pass  # what was not flushed has nobody to read it


def checked(messages: Any) -> list[dict[str, Any]]:
    """``messages`` as plain dicts whose content is a text.

    Raises:
        Problems: every message that is wrong.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise Problems("messages", [f"{type(messages).__name__} found, wanted a list of at least one message with role and content"])
    problems: list[str] = []
    found = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            problems.append(f"message {i} is {type(message).__name__}, wanted an object with role and content")
            continue
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            problems.append(f"message {i} has role {role!r:.40}, wanted a text such as 'user'")
        text = _text(content)
        if text is None:
            problems.append(f"message {i} has content {content!r:.40}, wanted a text or a list of {{'type': 'text', 'text': …}}")
        elif len(text) > MAX_CHARACTERS:
            problems.append(f"message {i} has {len(text)} characters, wanted at most {MAX_CHARACTERS}")
        found.append({**message, "content": text})
    if problems:
        raise Problems("messages", problems)
    return found


def _text(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return None
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    return "\n".join(part for part in parts if isinstance(part, str)) if all(isinstance(part, str) for part in parts) else None
