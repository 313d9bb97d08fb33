"""Sampling parameters: every wrong value is named, all at once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fitment.errors import Problems
from fitment_engine.sampling_params import SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("n", 0), ("n", True), ("n", 1.5), ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
    ("top_k", -2), ("top_k", 1.0), ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 2),
    ("repetition_penalty", 0), ("presence_penalty", math.inf), ("frequency_penalty", None), ("seed", 1.0), ("seed", 2**64),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5), ("stop", ["x"] * 65), ("stop", "x" * 5000), ("stop_token_ids", "12"),
    ("stop_token_ids", [1.0]), ("stop_token_ids", [True]), ("ignore_eos", 1), ("max_tokens", 0), ("max_tokens", True), ("min_tokens", -1),
    ("logprobs", -1), ("logprobs", 1001), ("prompt_logprobs", True), ("skip_special_tokens", "yes"), ("include_stop_str_in_output", None),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda item: str(item)[:20])
def test_a_wrong_value_is_named_with_what_was_found(name: str, value: Any) -> None:
    with pytest.raises(Problems) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).count(name) >= 1
    assert "wanted" in str(caught.value)


RIGHT: list[dict[str, Any]] = [
    {},
    {"temperature": 0}, {"temperature": 0.0}, {"top_k": -1}, {"top_k": 50}, {"top_p": 1}, {"min_p": 0.05}, {"seed": -1}, {"seed": 2**63},
    {"stop": "x"}, {"stop": ["x", "yz"]}, {"stop": []}, {"stop_token_ids": [1, 2]}, {"max_tokens": None}, {"logprobs": 0},
    {"min_tokens": 16}, {"presence_penalty": -2}, {"n": 4},
]


@pytest.mark.parametrize("values", RIGHT, ids=str)
def test_right_values_survive_a_round_trip(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert SamplingParams.from_dict(params.to_dict()) == params


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(Problems) as caught:
        SamplingParams(temperature=-1, top_p=2, stop="", logprobs=-5)
    assert all(name in str(caught.value) for name in ("temperature", "top_p", "stop", "logprobs"))


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(Problems, match="min_tokens is 17"):
        SamplingParams(max_tokens=16, min_tokens=17)


def test_an_unknown_name_is_told_its_nearest() -> None:
    with pytest.raises(Problems, match="did you mean temperature"):
        SamplingParams.from_dict({"temprature": 1.0})
