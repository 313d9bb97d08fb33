"""Measures llama.cpp through llama-cpp-python, one sequence at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from serve import prompt, serve


def load(options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    from llama_cpp import Llama

    llm = Llama(options["model"], n_ctx=options["max_model_len"], n_threads=options["threads"], n_threads_batch=options["threads"],
                n_batch=512, verbose=False)
    vocab = llm.n_vocab()

    def prefill(length: int, seed: int) -> float:
        llm.reset()
        started = time.perf_counter()
        llm.eval(prompt(length, vocab, seed))
        return length / (time.perf_counter() - started)

    def decode(context: int, output: int, seed: int) -> float:
        llm.reset()
        llm.eval(prompt(context, vocab, seed))
        token = llm.sample(temp=0.0)
        started = time.perf_counter()
        for _ in range(output):
            llm.eval([token])
            token = llm.sample(temp=0.0)
        return output / (time.perf_counter() - started)

    return {"prefill": prefill, "decode": decode}


if __name__ == "__main__":
    serve(load)
