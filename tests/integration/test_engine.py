"""What a request can ask for, on a tiny model: every parameter does what it says, and nobody's request harms another's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from fitment.errors import FitmentError, Problems
from fitment_engine import LLM, SamplingParams
from support import EXACT, TINY

PROMPT = [5, 17, 99, 240, 31]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams.from_dict({**GREEDY.to_dict(), **changes})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The tiny model; each test must leave it without work."""
    model = LLM(TINY, **EXACT)
    yield model
    assert not model.engine.has_work


def tokens(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    [output] = llm.generate([prompt], params)
    return output.outputs[0].token_ids


def test_max_tokens_ends_with_length(llm: LLM) -> None:
    [output] = llm.generate([PROMPT], greedy(max_tokens=3))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (3, "length")


def test_a_stop_token_ends_and_is_not_in_the_text(llm: LLM) -> None:
    usual = tokens(llm, GREEDY)
    stop = usual[4]
    first = usual.index(stop)
    [output] = llm.generate([PROMPT], greedy(stop_token_ids=[stop]))
    completion = output.outputs[0]
    assert completion.token_ids == usual[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == llm.tokenizer.decode(usual[:first])


def test_min_tokens_holds_the_stop_back(llm: LLM) -> None:
    stop = tokens(llm, GREEDY)[0]
    found = tokens(llm, greedy(stop_token_ids=[stop], min_tokens=6))
    assert len(found) >= 6
    assert stop not in found[:6]


def test_a_stop_string_ends_where_it_begins(llm: LLM) -> None:
    [usual] = llm.generate([PROMPT], GREEDY)
    text = usual.outputs[0].text
    stop = text[5:8]
    [output] = llm.generate([PROMPT], greedy(stop=[stop]))
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    [included] = llm.generate([PROMPT], greedy(stop=stop, include_stop_str_in_output=True))
    assert included.outputs[0].text == text[: text.index(stop) + len(stop)]


def test_streamed_text_is_the_whole_text(llm: LLM) -> None:
    [whole] = llm.generate([PROMPT], GREEDY)
    seen = [output.outputs[0].text for output in llm.stream(PROMPT, GREEDY)]
    assert seen[-1] == whole.outputs[0].text
    assert all(later.startswith(earlier) for earlier, later in zip(seen, seen[1:], strict=False))


def test_a_stream_that_is_closed_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    assert tokens(llm, GREEDY) == tokens(llm, GREEDY)


def test_n_continuations_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=12, ignore_eos=True)
    [first] = llm.generate([PROMPT], params)
    [second] = llm.generate([PROMPT], params)
    ids = [completion.token_ids for completion in first.outputs]
    assert ids == [completion.token_ids for completion in second.outputs]
    assert len({tuple(i) for i in ids}) == 4


def test_logprobs_sum_and_contain_the_chosen(llm: LLM) -> None:
    [output] = llm.generate([PROMPT], greedy(logprobs=3))
    completion = output.outputs[0]
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    chosen = [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert math.isclose(sum(chosen), completion.cumulative_logprob, rel_tol=1e-6)
    assert all(len(step) == 3 and step[token].rank == 1 for step, token in zip(completion.logprobs, completion.token_ids, strict=True))


def test_prompt_logprobs_do_not_depend_on_chunks(llm: LLM) -> None:
    chunked = LLM(TINY, **EXACT, max_batch_tokens=7)
    prompt = [(7 * i) % 319 + 1 for i in range(60)]
    params = greedy(prompt_logprobs=2, max_tokens=1)
    [whole], [parts] = llm.generate([prompt], params), chunked.generate([prompt], params)
    assert whole.prompt_logprobs is not None and len(whole.prompt_logprobs) == len(prompt)
    assert whole.prompt_logprobs == parts.prompt_logprobs


def test_a_repetition_penalty_forbids_loops(llm: LLM) -> None:
    found = tokens(llm, greedy(repetition_penalty=1000.0, max_tokens=60))
    assert len(set(found)) == 60


def test_all_wrong_prompts_are_named_and_nothing_is_computed(llm: LLM) -> None:
    with pytest.raises(Problems) as caught:
        llm.generate([[], PROMPT, [320], [-1], [1] * 600])
    text = str(caught.value)
    assert "prompt 0" in text and "empty" in text
    assert "prompt 2" in text and "320" in text
    assert "prompt 3" in text and "-1" in text
    assert "prompt 4" in text and "600" in text
    assert "prompt 1" not in text
    assert not llm.engine.has_work


def test_sampling_params_must_be_as_many_as_prompts(llm: LLM) -> None:
    with pytest.raises(FitmentError, match="2 given for 1"):
        llm.generate([PROMPT], [GREEDY, GREEDY])


def test_a_sequence_ends_at_the_longest_length() -> None:
    short = LLM(TINY, **EXACT, max_model_len=16)
    [output] = short.generate([PROMPT], greedy(max_tokens=None))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 16
    assert output.outputs[0].finish_reason == "length"


def test_logits_that_are_no_numbers_end_that_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine._runner
    run = runner.run
    alone = tokens(llm, GREEDY)

    def poisoned(scheduled: list) -> torch.Tensor:  # type: ignore[type-arg]
        logits = run(scheduled)
        for row, (seq, _) in zip(logits, scheduled, strict=True):
            if seq.token_ids[0] == 7 and seq.num_outputs == 3:
                row.fill_(math.nan)
        return logits

    monkeypatch.setattr(runner, "run", poisoned)
    good, bad = llm.generate([PROMPT, [7, *PROMPT]], GREEDY)
    assert good.outputs[0].token_ids == alone
    assert bad.outputs[0].finish_reason == "error"
    assert len(bad.outputs[0].token_ids) == 3
