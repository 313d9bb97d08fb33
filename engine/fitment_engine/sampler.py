"""From logits to tokens: penalties, the op ``sample``, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from fitment_engine.outputs import Logprob
from fitment_engine.sequence import Sequence

_BELOW_ONE = 1.0 - 2.0**-24
"""The greatest fp32 below 1."""


class Sampler:
    """Samples a token for each sequence of a step."""

    def __init__(self, sample: Callable[..., None], max_num_seqs: int, device: torch.device) -> None:
        self._sample = sample
        self._device = device
        self._out = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def __call__(self, logits: torch.Tensor, seqs: Seq[Sequence]) -> list[int]:
        """Sample.

        Args:
            logits: fp32 ``[len(seqs), vocab]``; penalties change it in place.
            seqs: The rows' sequences; each one's random state advances by one draw, its log-probabilities are not touched.

        Returns:
            A token id each; -1 where the logits are not numbers.
        """
        for row, seq in zip(logits, seqs, strict=True):
            adjust(row, seq)

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        params = [seq.params for seq in seqs]
        out = self._out[: len(seqs)]
        self._sample(
            logits,
            column([p.temperature for p in params]),
            column([max(p.top_k, 0) for p in params], torch.int32),
            column([p.top_p for p in params]),
            column([p.min_p for p in params]),
            column([min(seq.random.random(), _BELOW_ONE) for seq in seqs]),
            out,
        )
        tokens: list[int] = out.tolist()
        return tokens


def adjust(row: torch.Tensor, seq: Sequence) -> None:
    """Apply penalties and ``min_tokens`` to one row of logits, in place.

    The repetition penalty (Keskar et al., arXiv:1909.05858) divides positive and multiplies negative logits of tokens in the prompt or
    the output; the presence and frequency penalties subtract for tokens of the output, once and per occurrence.
    """
    params = seq.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(seq.token_ids)), dtype=torch.int64, device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and seq.output_counts:
        ids = torch.tensor(list(seq.output_counts), dtype=torch.int64, device=row.device)
        counts = torch.tensor(list(seq.output_counts.values()), dtype=torch.float32, device=row.device)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if seq.num_outputs < params.min_tokens and seq.stop_token_ids:
        row[torch.tensor(sorted(seq.stop_token_ids), dtype=torch.int64, device=row.device)] = float("-inf")


def top_logprobs(row: torch.Tensor, token_id: int, count: int, decode: Callable[[int], str]) -> dict[int, Logprob]:
    """The log-probabilities of ``token_id`` and of the ``count`` best tokens.

    Args:
        row: fp32 ``[vocab]``, the model's own logits.
        token_id: A token that is always among them.
        count: How many of the best.
        decode: A token's text.
    """
    logprobs = row.log_softmax(-1)
    values, ids = logprobs.topk(min(count, len(row)))
    chosen = float(logprobs[token_id])
    rank = int((logprobs > chosen).sum()) + 1
    found = {token_id: Logprob(chosen, rank, decode(token_id))}
    for i, (value, token) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
        found.setdefault(token, Logprob(value, i + 1, decode(token)))
    return found
