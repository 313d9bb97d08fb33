"""The engine: requests in, one step at a time, outputs out."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from fitment_engine.outputs import CompletionOutput, Metrics, RequestOutput
from fitment_engine.runner import Runner
from fitment_engine.sampler import Sampler, top_logprobs
from fitment_engine.sampling_params import SamplingParams
from fitment_engine.scheduler import BlockPool, Scheduler
from fitment_engine.sequence import Sequence
from fitment_engine.stop_strings import StopMatcher
from fitment_engine.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(eq=False)
class _Continuation:
    """A sequence, its text so far, and the machinery that makes it."""

    seq: Sequence
    output: CompletionOutput
    detokenizer: IncrementalDetokenizer
    matcher: StopMatcher | None
    num_seen: int = 0
    parts: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Request:
    output: RequestOutput
    continuations: list[_Continuation]


class Engine:
    """Continuous batching over one runner; not thread-safe."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        plan = runner.plan
        self.tokenizer = tokenizer
        self.max_model_len = plan.max_model_len
        self._runner = runner
        self._sampler = Sampler(runner.sample, plan.max_num_seqs, runner.device)
        self._scheduler = Scheduler(BlockPool(plan.num_blocks, plan.kv_layout.block_size), plan.max_num_seqs, plan.max_batch_tokens)
        self._requests: dict[str, _Request] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    def problem(self, prompt_ids: Seq[int], params: SamplingParams) -> str | None:
        """Why a request cannot be served, or None."""
        vocab = self._runner.plan.request.model.vocab_size
        if not prompt_ids:
            return "the prompt is empty; give at least one token"
        wrong = next((token for token in prompt_ids if not 0 <= token < vocab), None)
        if wrong is not None:
            return f"prompt token id {wrong} is not in the vocabulary of {vocab}"
        wrong = next((token for token in params.stop_token_ids or () if not 0 <= token < vocab), None)
        if wrong is not None:
            return f"stop_token_ids: {wrong} is not in the vocabulary of {vocab}"
        if len(prompt_ids) >= self.max_model_len:
            return (f"the prompt has {len(prompt_ids)} tokens, and {self.max_model_len} is the longest sequence here, "
                    "output included; shorten it, or start with a greater --max-model-len")
        return None

    def add_request(self, request_id: str, prompt: str | None, prompt_ids: Seq[int], params: SamplingParams) -> None:
        """Queue a request.

        Raises:
            ValueError: it cannot be served (see :meth:`problem`), or its id is in use.
        """
        problem = self.problem(prompt_ids, params)
        if problem or request_id in self._requests:
            raise ValueError(f"request {request_id!r}: {problem or 'its id is in use'}")
        own = set(params.stop_token_ids or ())
        stops = frozenset(own if params.ignore_eos else own | set(self.tokenizer.stop_token_ids))
        stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        continuations = []
        for index in range(params.n):
            seed = None if params.seed is None else params.seed + index
            seq = Sequence(request_id, index, list(prompt_ids), len(prompt_ids), params, stops, random=random.Random(seed))
            if params.prompt_logprobs is not None and index == 0:
                seq.prompt_logprobs.append(None)
            continuations.append(_Continuation(
                seq, CompletionOutput(index), self.tokenizer.detokenizer(skip_special=params.skip_special_tokens),
                StopMatcher(stop, params.include_stop_str_in_output) if stop else None))
        output = RequestOutput(request_id, prompt, list(prompt_ids), [c.output for c in continuations], False,
                               Metrics(time.perf_counter()))
        self._requests[request_id] = _Request(output, continuations)
        self._scheduler.add(c.seq for c in continuations)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests where they are; unknown ids are passed over."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            for continuation in request.continuations if request else ():
                if not continuation.seq.is_finished:
                    continuation.seq.finish_reason = continuation.output.finish_reason = "abort"
        self._scheduler.remove_finished()

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the requests that got something new. Their outputs are the same objects at every step."""
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return []
        with torch.inference_mode():
            touched = self._compute(scheduled)
        now = time.perf_counter()
        outputs = []
        for request_id in dict.fromkeys(seq.request_id for seq in touched):
            request = self._requests[request_id]
            self._update(request, now)
            outputs.append(request.output)
            if request.output.finished:
                del self._requests[request_id]
        self._scheduler.remove_finished()
        return outputs

    def _compute(self, scheduled: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Run the step and append the sampled tokens; returns the sequences that got one."""
        logits: torch.Tensor
        if any(_wants_prompt_logprobs(seq) for seq, _ in scheduled):
            logits = self._with_prompt_logprobs(scheduled)
        else:
            logits = self._runner.run(scheduled)
        for seq, count in scheduled:
            seq.num_computed += count
        rows = [i for i, (seq, _) in enumerate(scheduled) if seq.num_pending == 0]
        seqs = [scheduled[i][0] for i in rows]
        if not seqs:
            return []
        if len(rows) < len(scheduled):
            logits = logits[rows]
        wanted = [i for i, seq in enumerate(seqs) if seq.params.logprobs is not None]
        raw = {i: logits[i].clone() for i in wanted}
        for i, (seq, token) in enumerate(zip(seqs, self._sampler(logits, seqs), strict=True)):
            if token < 0:
                seq.finish_reason, seq.stop_reason = "error", "the model's logits are not numbers"
                continue
            seq.append(token)
            if i in raw:
                found = top_logprobs(raw[i], token, seq.params.logprobs or 0, self._decode_token)
                seq.logprobs.append(found)
                seq.cumulative_logprob += found[token].logprob
            seq.finish_by_tokens(self.max_model_len)
        return seqs

    def _with_prompt_logprobs(self, scheduled: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Run a step with the logits of every token, record those that predict prompt tokens; returns what ``Runner.run`` does."""
        owners = [(seq, seq.num_computed + j, i, j == count - 1) for i, (seq, count) in enumerate(scheduled) for j in range(count)]
        last: dict[int, torch.Tensor] = {}
        for start, logits in self._runner.run_all_logits(scheduled):
            for row, (seq, position, i, is_last) in zip(logits, owners[start : start + len(logits)], strict=True):
                target = position + 1
                if _wants_prompt_logprobs(seq) and target < seq.num_prompt and target == len(seq.prompt_logprobs):
                    seq.prompt_logprobs.append(
                        top_logprobs(row, seq.token_ids[target], seq.params.prompt_logprobs or 0, self._decode_token))
                if is_last:
                    last[i] = row.clone()
        return torch.stack([last[i] for i in range(len(scheduled))])

    def _decode_token(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special=False)

    def _update(self, request: _Request, now: float) -> None:
        metrics = request.output.metrics
        if metrics.first_token is None:
            metrics.first_token = now
        for continuation in request.continuations:
            if continuation.output.finish_reason is None:
                _extend_text(continuation)
        first = request.continuations[0].seq
        if first.params.prompt_logprobs is not None:
            request.output.prompt_logprobs = first.prompt_logprobs
        if all(continuation.seq.is_finished for continuation in request.continuations):
            request.output.finished = True
            metrics.finished = now


def _wants_prompt_logprobs(seq: Sequence) -> bool:
    return seq.params.prompt_logprobs is not None and seq.index == 0 and len(seq.prompt_logprobs) < seq.num_prompt


def _extend_text(continuation: _Continuation) -> None:
    """Detokenize what is new, look for stop strings, and copy the sequence's state into its output."""
    seq, output = continuation.seq, continuation.output
    generated = seq.token_ids[seq.num_prompt + continuation.num_seen :]
    continuation.num_seen += len(generated)
    text = ""
    for token in generated:
        is_silent_stop = seq.finish_reason == "stop" and token == seq.stop_reason and token is generated[-1]
        if not is_silent_stop:
            text += continuation.detokenizer.add(token)
    if seq.is_finished:
        text += continuation.detokenizer.finish()
    if continuation.matcher is not None:
        may_stop = seq.num_outputs >= seq.params.min_tokens
        text, stop = continuation.matcher.add(text) if may_stop else (text, None)
        if stop is not None:
            seq.finish_reason, seq.stop_reason = "stop", stop
        elif seq.is_finished:
            text += continuation.matcher.finish()
    output.text += text
    output.token_ids.extend(generated)
    if seq.params.logprobs is not None:
        output.logprobs, output.cumulative_logprob = seq.logprobs, seq.cumulative_logprob
    output.finish_reason, output.stop_reason = seq.finish_reason, seq.stop_reason
