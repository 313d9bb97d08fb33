"""What a request gives: the shape is the field's own."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability under the model's own distribution (before temperature and filters), its rank from 1, its text."""

    logprob: float
    rank: int
    decoded_token: str = ""


@dataclass
class CompletionOutput:
    """One continuation.

    ``finish_reason`` is None while it grows, then ``"stop"`` (``stop_reason`` is the stop string, or the stop token's id),
    ``"length"``, ``"abort"`` or ``"error"`` (``stop_reason`` says what went wrong).
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Metrics:
    """Seconds: when the request arrived (``time.perf_counter``), its first token, its end."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None


@dataclass
class RequestOutput:
    """All that is known of a request; ``prompt_logprobs`` has None for the first token, which nothing predicts."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: Metrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
