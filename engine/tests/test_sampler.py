"""Penalties and log-probabilities against their papers' formulas, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fitment.ops import op
from fitment_engine.sampler import Sampler, adjust, top_logprobs
from fitment_engine.sampling_params import SamplingParams
from fitment_engine.sequence import Sequence


def sequence(params: SamplingParams, prompt: list[int], output: list[int], stops: frozenset[int] = frozenset()) -> Sequence:
    seq = Sequence("r", 0, list(prompt), len(prompt), params, stops)
    for token in output:
        seq.append(token)
    return seq


def test_the_repetition_penalty_takes_prompt_and_output() -> None:
    row = torch.tensor([2.0, -2.0, 1.0, 4.0, -1.0])
    adjust(row, sequence(SamplingParams(repetition_penalty=2.0), [0, 1], [3, 3]))
    assert row.tolist() == [1.0, -4.0, 1.0, 2.0, -1.0]


def test_presence_and_frequency_take_the_output_alone() -> None:
    row = torch.zeros(5)
    adjust(row, sequence(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [0, 1], [3, 3, 4]))
    assert row.tolist() == [0.0, 0.0, 0.0, -1.0, -0.75]


def test_min_tokens_forbids_stop_tokens_until_then() -> None:
    params = SamplingParams(min_tokens=2, max_tokens=9)
    early, late = torch.zeros(4), torch.zeros(4)
    adjust(early, sequence(params, [0], [1], frozenset((2, 3))))
    adjust(late, sequence(params, [0], [1, 1], frozenset((2, 3))))
    assert early.tolist() == [0.0, 0.0, -math.inf, -math.inf]
    assert late.tolist() == [0.0] * 4


def test_logprobs_are_those_of_a_softmax_with_ranks() -> None:
    row = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))
    found = top_logprobs(row + 3.0, 0, 2, str)
    assert {token: round(math.exp(lp.logprob), 5) for token, lp in found.items()} == {0: 0.1, 1: 0.4, 2: 0.3}
    assert {token: lp.rank for token, lp in found.items()} == {0: 4, 1: 1, 2: 2}
    assert found[2].decoded_token == "2"


def test_rows_are_sampled_with_their_own_parameters() -> None:
    sampler = Sampler(op("sample").reference, 4, torch.device("cpu"))
    logits = torch.tensor([[0.0, 5.0, 1.0], [9.0, 8.0, 0.0], [math.nan, 0.0, 0.0]])
    greedy, top_one = SamplingParams(temperature=0.0), SamplingParams(temperature=5.0, top_k=1)
    seqs = [sequence(greedy, [0], []), sequence(top_one, [0], []), sequence(greedy, [0], [])]
    assert sampler(logits, seqs) == [1, 0, -1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    """Chi-square of 4,000 draws over 4 tokens; 3 degrees of freedom exceed 25 once in 60,000 runs, and the seed is fixed."""
    sampler = Sampler(op("sample").reference, 4000, torch.device("cpu"))
    row = torch.tensor([0.0, 1.0, -1.0, 0.5])
    seqs = []
    for seed in range(4000):
        seq = sequence(SamplingParams(temperature=temperature, seed=seed), [0], [])
        seq.random.seed(seed)
        seqs.append(seq)
    draws = torch.tensor(sampler(row.repeat(4000, 1), seqs))
    expected = 4000 * (row.double() / temperature).softmax(-1)
    found = torch.bincount(draws, minlength=4).double()
    assert float(((found - expected) ** 2 / expected).sum()) < 25
