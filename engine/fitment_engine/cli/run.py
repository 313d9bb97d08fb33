"""Answer one question, or chat on a terminal. Ctrl-C ends the answer, not the session."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fitment.errors import FitmentError
from fitment_engine.cli.options import DEFAULT_MODEL, add_model_options, add_sampling_options, load_model, sampling_params

if TYPE_CHECKING:
    from fitment_engine.llm import LLM
    from fitment_engine.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fitment run``."""
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"a path, a built-in name or a hub id (default {DEFAULT_MODEL})")
    parser.add_argument("question", nargs="?", help="what to ask; without it: a chat on a terminal, or the question from standard input")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    add_model_options(parser)
    add_sampling_options(parser, max_tokens=512)


def run(arguments: argparse.Namespace) -> int:
    """Answer or chat."""
    params = sampling_params(arguments)
    question = arguments.question
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
    if question is not None and not question:
        raise FitmentError("the question is empty; give one as an argument or on standard input")
    started = time.perf_counter()
    llm = load_model(arguments)
    if question is not None:
        ids = llm.encode(question) if arguments.raw else llm.encode_chat(_system(arguments.system) + [_user(question)])
        _text, finish_reason = _answer(llm, ids, params, started)
        return 1 if finish_reason == "error" else 130 if finish_reason == "abort" else 0
    return _chat(llm, params, arguments.system)


def _system(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _chat(llm: LLM, params: SamplingParams, system: str | None) -> int:
    """Read questions until the end of input; the conversation grows, and what cannot be served is said and forgotten."""
    print("Ask; Ctrl-C ends an answer, Ctrl-D the chat.", file=sys.stderr)
    messages = _system(system)
    for question in _questions():
        try:
            ids = llm.encode_chat([*messages, _user(question)])
            text, _reason = _answer(llm, ids, params, time.perf_counter())
        except (FitmentError, ValueError) as error:
            print(f"fitment: {error}", file=sys.stderr)
            continue
        messages += [_user(question), {"role": "assistant", "content": text}]
    return 0


def _questions() -> Iterator[str]:
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if question:
            yield question


def _answer(llm: LLM, ids: list[int], params: SamplingParams, started: float) -> tuple[str, str | None]:
    """Stream one answer to stdout and its figures to stderr; returns the text and why it ended."""
    problem = llm.engine.problem(ids, params)
    if problem:
        raise FitmentError(problem)
    shown, first, output = 0, started, None
    stream = llm.stream(ids, params)
    reason: str | None = "abort"
    try:
        for output in stream:
            text = output.outputs[0].text
            if output.metrics.first_token is not None:
                first = output.metrics.first_token
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
            reason = output.outputs[0].finish_reason
    except KeyboardInterrupt:
        stream.close()
        reason = "abort"
    ended = time.perf_counter()
    print(flush=True)
    if output is None:
        return "", reason
    completion = output.outputs[0]
    number = len(completion.token_ids)
    rate = f" · {(number - 1) / (ended - first):.0f} tokens/s" if number > 1 and ended > first else ""
    why = {"abort": " · ended by you", "error": " · ended by an error"}.get(reason or "", "")
    print(f"{number} tokens · {first - started:.2f} s to first{rate}{why}", file=sys.stderr)
    if reason == "error":
        print(f"fitment: {completion.stop_reason}", file=sys.stderr)
    return completion.text, reason
