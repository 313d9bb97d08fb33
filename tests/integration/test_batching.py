"""What a sequence gives does not depend on who is computed beside it."""

from __future__ import annotations

import random
from collections.abc import Callable

from fitment_engine import LLM, SamplingParams
from support import EXACT


def prompts(number: int, longest: int) -> list[list[int]]:
    rng = random.Random(7)
    lengths = [rng.choice((1, 2, 5, 16, 31, 32, 33, rng.randint(1, longest))) for _ in range(number)]
    return [[rng.randrange(20, 49000) for _ in range(length)] for length in lengths]


def tokens(llm: LLM, many: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(many, params)]


def test_64_prompts_in_one_batch_give_what_each_gives_alone(exact: LLM) -> None:
    many = prompts(64, 200)
    params = [SamplingParams(temperature=0.0, max_tokens=4 + i % 13, ignore_eos=True) for i in range(len(many))]
    together = exact.generate(many, params)
    for prompt, own, output in zip(many, params, together, strict=True):
        [alone] = exact.generate([prompt], own)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_preempted_sequences_give_the_same(exact: LLM, start: Callable[..., LLM]) -> None:
    """A cache for 300 tokens and 8 sequences that want 8 × 100: some are preempted and computed again."""
    layer_bytes = 2 * 3 * 64 * 4
    small = start(**EXACT, max_model_len=256, kv_memory_bytes=320 * 30 * layer_bytes)
    many = prompts(8, 60)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    assert tokens(small, many, params) == tokens(exact, many, params)


def test_long_prompts_in_chunks_give_the_same(exact: LLM, start: Callable[..., LLM]) -> None:
    chunked = start(**EXACT, max_batch_tokens=64)
    many = prompts(4, 50) + [[i % 40000 + 20 for i in range(700)]]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert tokens(chunked, many, params) == tokens(exact, many, params)


def test_a_seed_repeats_its_tokens_whatever_is_beside_it(exact: LLM) -> None:
    prompt = exact.encode("Once upon a time")
    seeded = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)
    others = [SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)] * 5
    [alone] = exact.generate([prompt], seeded)
    together = exact.generate([prompt] * 6, [*others, seeded])
    assert together[-1].outputs[0].token_ids == alone.outputs[0].token_ids
