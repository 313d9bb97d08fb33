"""Rotary tables against transformers' own frequencies (``data/rope.json``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fitment.description import ModelDescription, RopeScaling
from fitment.errors import Problems
from fitment_engine.rope import cos_sin_table
from fitment_engine.rope_scalings import REQUIRED, ROPE_SCALINGS

CASES = json.loads((Path(__file__).parent / "data" / "rope.json").read_text(encoding="utf-8"))["cases"]


def description(head_size: int, theta: float, max_position: int, scaling: dict[str, Any] | None) -> ModelDescription:
    rope = None
    if scaling is not None:
        rope = RopeScaling(scaling["rope_type"], {key: value for key, value in scaling.items() if key != "rope_type"})
    return ModelDescription("llama", 1, head_size, 4, 1, 1, head_size, 16, max_position, rope_theta=theta, rope_scaling=rope)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_tables_are_those_of_transformers(case: dict[str, Any]) -> None:
    table = cos_sin_table(description(case["head_size"], case["theta"], case["max_position"], case["scaling"]), 64)
    angles = torch.arange(64, dtype=torch.float64).unsqueeze(-1) * torch.tensor(case["inv_freq"], dtype=torch.float64)
    wanted = torch.cat((angles.cos(), angles.sin()), -1) * case["attention_scaling"]
    assert table.dtype == torch.float32
    assert torch.allclose(table.to(torch.float64), wanted, rtol=0, atol=1e-4)  # the fixture's frequencies are fp32


def test_factors_divide_the_frequencies() -> None:
    plain = cos_sin_table(description(8, 10000.0, 32, None), 8)
    divided = cos_sin_table(description(8, 10000.0, 32, {"rope_type": "factors"}), 8, [2.0] * 4)
    assert torch.equal(divided[::2], plain[:4])


def test_every_scaling_says_what_it_requires() -> None:
    assert set(REQUIRED) == set(ROPE_SCALINGS)


def test_all_missing_parameters_are_named_at_once() -> None:
    with pytest.raises(Problems) as caught:
        cos_sin_table(description(8, 10000.0, 32, {"rope_type": "llama3", "factor": 2.0}), 8)
    assert all(name in str(caught.value) for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
