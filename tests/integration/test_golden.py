"""The whole path against an independent implementation's values (``tests/data/golden/README.md``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from fitment_engine import LLM, SamplingParams
from support import EXACT, GOLDEN, golden

CASES = golden("smollm2_135m_q4_1_fp32_greedy.json")
PERPLEXITY = golden("smollm2_135m_q4_1_fp32_perplexity.json")
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=5)


def encode(llm: LLM, case: dict[str, Any]) -> list[int]:
    if case["kind"] == "chat":
        return llm.encode_chat([{"role": "user", "content": case["prompt"]}])
    return llm.encode(case["prompt"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:24].strip())
def test_greedy_tokens_and_logprobs_in_fp32(exact: LLM, case: dict[str, Any]) -> None:
    ids = encode(exact, case)
    assert ids == case["prompt_ids"]
    [output] = exact.generate([ids], GREEDY)
    completion = output.outputs[0]
    assert completion.token_ids == case["greedy_ids"]
    assert completion.logprobs is not None
    worst = max(abs(step[token].logprob - value) for step, wanted in zip(completion.logprobs, case["top5_logprobs"], strict=True)
                for token, value in wanted if token in step)
    assert worst < 2e-3


def mean_nll(llm: LLM) -> float:
    """Mean negative log-likelihood of the first tokens of the prose, as the golden file counts them."""
    count = PERPLEXITY["tokens"]
    ids = llm.encode((GOLDEN / "prose.txt").read_text(encoding="utf-8"))[:count]
    assert ids[: len(PERPLEXITY["first_ids"])] == PERPLEXITY["first_ids"]
    [output] = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    values = [-step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True) if step is not None]
    for found, wanted in zip(values, PERPLEXITY["first_64_nll"], strict=False):
        assert math.isclose(found, wanted, abs_tol=1.0)
    return sum(values) / len(values)


def test_perplexity_in_fp32(exact: LLM) -> None:
    assert math.exp(mean_nll(exact)) == pytest.approx(PERPLEXITY["perplexity"], rel=2e-4)


def test_perplexity_with_bf16_activations(start: Callable[..., LLM]) -> None:
    assert math.exp(mean_nll(start(**{**EXACT, "activations": "bf16"}))) == pytest.approx(PERPLEXITY["perplexity"], rel=2e-3)


def test_perplexity_with_int8_activations(start: Callable[..., LLM]) -> None:
    assert math.exp(mean_nll(start(**{**EXACT, "activations": "int8"}))) == pytest.approx(PERPLEXITY["perplexity"], rel=1e-2)


@pytest.mark.parametrize(("activations", "limit"), [("bf16", 1e-4), ("int8", 1e-2)])
def test_first_logprobs_of_quantized_activations(start: Callable[..., LLM], activations: str, limit: float) -> None:
    """Normalised mean squared error of the golden file's best five log-probabilities at the first step."""
    llm = start(**{**EXACT, "activations": activations})
    error = power = 0.0
    for case in CASES:
        [output] = llm.generate([case["prompt_ids"]], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20))
        assert output.outputs[0].logprobs is not None
        step = output.outputs[0].logprobs[0]
        for token, value in case["top5_logprobs"][0]:
            assert token in step
            error += (step[token].logprob - value) ** 2
            power += value**2
    assert error / power < limit


def test_the_default_plan_answers(start: Callable[..., LLM]) -> None:
    [output] = start().chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0, max_tokens=32))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
