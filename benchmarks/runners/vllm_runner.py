"""Measures vLLM's CPU build, which takes a Hugging Face directory (``dense_copy.py`` writes one)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from serve import prompt, serve


def load(options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options['threads'] - 1}"  # by itself it keeps a core free
    os.environ["OMP_NUM_THREADS"] = str(options["threads"])
    from vllm import LLM, SamplingParams

    llm = LLM(options["model"], dtype="bfloat16", max_model_len=options["max_model_len"], max_num_seqs=options["max_num_seqs"],
              enable_prefix_caching=False, skip_tokenizer_init=True)
    vocab = llm.llm_engine.model_config.get_vocab_size()

    def run(prompts: list[list[int]], output: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - started

    def prefill(length: int, seed: int) -> float:
        return length / run([prompt(length, vocab, seed)], 1)

    def decode(context: int, output: int, seed: int) -> float:
        short, long = run([prompt(context, vocab, seed)], 1), run([prompt(context, vocab, seed + 1)], output + 1)
        return output / (long - short)

    def throughput(concurrency: int, length: int, output: int, seed: int) -> float:
        return concurrency * output / run([prompt(length, vocab, seed + i) for i in range(concurrency)], output)

    return {"prefill": prefill, "decode": decode, "throughput": throughput}


if __name__ == "__main__":
    serve(load)
