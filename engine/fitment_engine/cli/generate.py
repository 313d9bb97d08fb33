"""Continue many prompts: a JSON object a line in, a JSON object a line out as each finishes; an interrupted run goes on where it was."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitment.errors import FitmentError
from fitment_engine.cli.options import add_model_options, add_sampling_options, load_model, sampling_params

if TYPE_CHECKING:
    from fitment_engine.llm import LLM
    from fitment_engine.outputs import RequestOutput
    from fitment_engine.sampling_params import SamplingParams

_KEYS = frozenset(("id", "prompt", "messages", "prompt_token_ids"))
_AHEAD = 2
"""Requests queued, as a multiple of those computed together: the file is read as it is needed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fitment generate``."""
    parser.add_argument("model", help="a path, a built-in name or a hub id")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl",
                        help="a line each: {\"prompt\": text} or {\"messages\": […]} or {\"prompt_token_ids\": […]}, "
                             "optionally \"id\" and sampling parameters")
    parser.add_argument("--output", type=Path, help="append results here and skip the ids that it has; default: standard output")
    add_model_options(parser)
    add_sampling_options(parser, max_tokens=128)


def run(arguments: argparse.Namespace) -> int:
    """Continue every prompt; 1 when any could not be served."""
    params = sampling_params(arguments)
    if not arguments.prompts.is_file():
        raise FitmentError(f"--prompts {arguments.prompts}: no such file")
    done = _finished_ids(arguments.output)
    llm = load_model(arguments)
    failed = total = 0
    try:
        target = arguments.output.open("a", encoding="utf-8") if arguments.output else nullcontext(sys.stdout)
    except OSError as error:
        raise FitmentError(f"--output {arguments.output}: {error}") from error
    with target as out:
        for result in _results(llm, _lines(arguments.prompts, done), params):
            out.write(json.dumps(result, ensure_ascii=False) + "\n")
            out.flush()
            total += 1
            failed += "error" in result
    print(f"{total} done, {failed} refused or failed, {len(done)} were there already", file=sys.stderr)
    return 1 if failed else 0


def _finished_ids(output: Path | None) -> set[str]:
    """The ids in an earlier run's output; a last line that was cut off is taken away."""
    if output is None or not output.exists():
        return set()
    done, end = set(), 0
    with output.open("rb") as file:
        for line in file:
            try:
                done.add(json.loads(line)["id"])
            except (ValueError, KeyError, TypeError) as error:
                if line.endswith(b"\n"):
                    raise FitmentError(f"--output {output}: line {len(done) + 1} is no result of `fitment generate`; "
                                       "name another file") from error
                break
            end += len(line)
    with output.open("rb+") as file:
        file.truncate(end)
    return done


def _lines(path: Path, done: set[str]) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Each line's id (its own, or its number from 1) and its object, or what is wrong with it; those in ``done`` are left out."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            request_id = str(number)
            item: dict[str, Any] | str
            try:
                item = json.loads(line)
                if not isinstance(item, dict):
                    item = f"line {number}: {type(item).__name__} found, wanted an object"
                else:
                    request_id = str(item.get("id", number))
            except (ValueError, RecursionError) as error:
                item = f"line {number}: no JSON: {error}"
            if request_id not in done:
                yield request_id, item


def _results(llm: LLM, lines: Iterator[tuple[str, dict[str, Any] | str]], params: SamplingParams) -> Iterator[dict[str, Any]]:
    """A result for each line as it finishes. A wrong line becomes a result with ``error``, and harms no other."""
    engine, pending = llm.engine, set[str]()
    limit = _AHEAD * llm.plan.max_num_seqs
    is_more = True
    while is_more or pending:
        while is_more and len(pending) < limit:
            line = next(lines, None)
            if line is None:
                is_more = False
                break
            request_id, item = line
            try:
                if request_id in pending:
                    raise FitmentError(f"id {request_id!r} is there twice")
                ids, own = _request(llm, item, params)
                engine.add_request(request_id, None, ids, own)
            except (FitmentError, ValueError) as error:
                yield {"id": request_id, "error": str(error)}
                continue
            pending.add(request_id)
        for output in engine.step() if pending else ():
            if output.finished:
                pending.discard(output.request_id)
                yield _result(output)


def _request(llm: LLM, item: dict[str, Any] | str, params: SamplingParams) -> tuple[list[int], SamplingParams]:
    if isinstance(item, str):
        raise FitmentError(item)
    given = [key for key in ("prompt", "messages", "prompt_token_ids") if key in item]
    if len(given) != 1:
        raise FitmentError(f"wanted one of prompt, messages, prompt_token_ids; found {', '.join(given) or 'none'}")
    own = {key: value for key, value in item.items() if key not in _KEYS}
    if own:
        params = type(params).from_dict({**params.to_dict(), **own})
    value = item[given[0]]
    if given[0] == "messages":
        return llm.encode_chat(value), params
    if given[0] == "prompt" and isinstance(value, str):
        return llm.encode(value), params
    if given[0] == "prompt_token_ids" and isinstance(value, list) and all(type(token) is int for token in value):
        return value, params
    raise FitmentError(f"{given[0]} is {type(value).__name__}, wanted {'a string' if given[0] == 'prompt' else 'a list of whole numbers'}")


def _result(output: RequestOutput) -> dict[str, Any]:
    result: dict[str, Any] = {"id": output.request_id, "outputs": []}
    for completion in output.outputs:
        if completion.finish_reason == "error":
            result["error"] = str(completion.stop_reason)
        entry: dict[str, Any] = {"index": completion.index, "text": completion.text, "token_ids": completion.token_ids,
                                 "finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        if completion.logprobs is not None:
            entry["logprobs"] = [{str(token): lp.logprob for token, lp in step.items()} for step in completion.logprobs]
        result["outputs"].append(entry)
    result["num_prompt_tokens"] = len(output.prompt_token_ids)
    return result


