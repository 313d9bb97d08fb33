"""Hugging Face directories, against transformers' values on a tiny random model (``tests/data/tiny-llama/golden.json``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fitment_engine import LLM, SamplingParams
from support import EXACT, TINY

GOLDEN = json.loads((TINY / "golden.json").read_text(encoding="utf-8"))


def model(directory: Path, config: dict[str, Any]) -> Path:
    """The tiny model with fields of its configuration replaced; None removes one."""
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, directory)
    fields = {**json.loads((TINY / "config.json").read_text(encoding="utf-8")), **config}
    kept = {key: value for key, value in fields.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return directory


@pytest.mark.parametrize("variant", GOLDEN["variants"])
def test_greedy_tokens_and_likelihoods(tmp_path: Path, variant: str) -> None:
    wanted = GOLDEN["variants"][variant]
    llm = LLM(model(tmp_path, wanted["config"]), **EXACT)
    prompt = GOLDEN["prompt_ids"]
    [scored] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None
    found = [-step[token].logprob for step, token in zip(scored.prompt_logprobs[1:], prompt[1:], strict=True) if step]
    assert found == pytest.approx(wanted["nll"], abs=2e-3)
    [output] = llm.generate([prompt[: GOLDEN["greedy_prompt_length"]]],
                            SamplingParams(temperature=0.0, max_tokens=len(wanted["greedy_ids"]), ignore_eos=True))
    assert output.outputs[0].token_ids == wanted["greedy_ids"]
