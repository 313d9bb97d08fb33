"""Measures Fitment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from serve import prompt, serve


def load(options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    from fitment_engine import LLM, SamplingParams

    llm = LLM(options["model"], max_model_len=options["max_model_len"], max_num_seqs=options["max_num_seqs"], **options.get("engine", {}))
    vocab = llm.plan.request.model.vocab_size

    def run(prompts: list[list[int]], output: int) -> tuple[float, list[Any]]:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return time.perf_counter() - started, outputs

    def prefill(length: int, seed: int) -> float:
        seconds, _ = run([prompt(length, vocab, seed)], 1)
        return length / seconds

    def decode(context: int, output: int, seed: int) -> float:
        _, [result] = run([prompt(context, vocab, seed)], output + 1)
        return output / (result.metrics.finished - result.metrics.first_token)

    def throughput(concurrency: int, length: int, output: int, seed: int) -> float:
        seconds, _ = run([prompt(length, vocab, seed + i) for i in range(concurrency)], output)
        return concurrency * output / seconds

    return {"prefill": prefill, "decode": decode, "throughput": throughput}


if __name__ == "__main__":
    serve(load)
