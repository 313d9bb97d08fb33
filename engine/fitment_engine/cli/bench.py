"""Measure prefill, decode and throughput of a model on this machine: medians of repeats, with their range."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING

from fitment_engine.cli.options import DEFAULT_MODEL, add_model_options, load_model, positive

if TYPE_CHECKING:
    from fitment_engine.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fitment bench``."""
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--input-len", type=positive, default=512, help="tokens of a prompt (default 512)")
    parser.add_argument("--output-len", type=positive, default=128, help="tokens of an answer (default 128)")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests of the throughput run (default 8)")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--json", action="store_true")
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    started = time.perf_counter()
    llm = load_model(arguments)
    figures: dict[str, list[float]] = {"load_s": [time.perf_counter() - started]}
    vocab = llm.plan.request.model.vocab_size
    prompt = [(i * 7919) % (vocab - 1) for i in range(arguments.input_len)]
    _once(llm, prompt, 1, arguments.output_len)
    for _ in range(arguments.repeats):
        prefill, decode, _total = _once(llm, prompt, 1, arguments.output_len)
        figures.setdefault("prefill_tokens_per_s", []).append(arguments.input_len / prefill)
        if arguments.output_len > 1:
            figures.setdefault("decode_tokens_per_s", []).append((arguments.output_len - 1) / decode)
        _prefill, _decode, total = _once(llm, prompt, arguments.concurrency, arguments.output_len)
        figures.setdefault(f"output_tokens_per_s_at_{arguments.concurrency}", []).append(
            arguments.concurrency * arguments.output_len / total)
    if arguments.json:
        print(json.dumps({name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
                          for name, values in figures.items()}, indent=2))
    else:
        for name, values in figures.items():
            print(f"{name:28} {statistics.median(values):10.2f}   ({min(values):.2f} to {max(values):.2f})")
    return 0


def _once(llm: LLM, prompt: list[int], number: int, output_len: int) -> tuple[float, float, float]:
    """Seconds from start to the first request's first token, from there to its end, and in all."""
    from fitment_engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate([prompt] * number, params)
    ended = time.perf_counter()
    first = outputs[0].metrics.first_token or ended
    return first - started, (outputs[0].metrics.finished or ended) - first, ended - started
