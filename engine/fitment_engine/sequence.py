"""A sequence: the tokens of one continuation, what of them is in the cache, and where."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from fitment_engine.outputs import Logprob
from fitment_engine.sampling_params import SamplingParams


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt, changed as it is computed.

    Attributes:
        request_id: The request that it belongs to.
        index: Which of the request's ``n`` continuations it is.
        token_ids: The prompt's ids and those generated.
        num_prompt: How many of them are the prompt.
        params: How to sample.
        stop_token_ids: Tokens that end it.
        num_computed: How many tokens have their keys and values in the cache.
        blocks: The cache's blocks that hold them, in order.
    """

    request_id: str
    index: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    random: random.Random = field(default_factory=random.Random)
    output_counts: Counter[int] = field(default_factory=Counter)
    num_preempted: int = 0

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not in the cache: 1 in decode, more in prefill."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def append(self, token_id: int) -> None:
        """Take a sampled token."""
        self.token_ids.append(token_id)
        self.output_counts[token_id] += 1

    def finish_by_tokens(self, max_model_len: int) -> None:
        """End it when its last token says so: a stop token, ``max_tokens``, or no room for another."""
        params = self.params
        last = self.token_ids[-1]
        if last in self.stop_token_ids and self.num_outputs >= params.min_tokens:
            self.finish_reason, self.stop_reason = "stop", last
        elif (params.max_tokens is not None and self.num_outputs >= params.max_tokens) or len(self.token_ids) >= max_model_len:
            self.finish_reason = "length"
