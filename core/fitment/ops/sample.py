"""``sample(…)``: one token a row, a pure function of the logits, the parameters and one uniform number."""

from __future__ import annotations

import torch


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Pick a token for each row.

    A temperature of 0 takes the greatest logit, the lowest index on ties. Otherwise p = softmax(logits / temperature); the
    ``top_k`` most probable are kept; of these, renormalised, the shortest prefix by falling probability whose sum reaches
    ``top_p``; of these, those of at least ``min_p`` times the greatest. What is kept is renormalised, and the first token *in
    vocabulary order* is taken whose running sum exceeds ``uniform``. Ties in probability fall to the lower index.

    Args:
        logits: fp32 ``[n, vocab]``, not changed.
        temperature: fp32 ``[n]``.
        top_k: int32 ``[n]``; 0 keeps all.
        top_p: fp32 ``[n]`` in (0, 1]; 1 keeps all.
        min_p: fp32 ``[n]`` in [0, 1]; 0 keeps all.
        uniform: fp32 ``[n]`` in [0, 1).
        out: int32 ``[n]``, written; -1 for a row that has a NaN or whose greatest logit is infinite.
    """
    for i in range(logits.shape[0]):
        row = logits[i].to(torch.float64)
        if torch.isnan(row).any() or not torch.isfinite(row.max()):
            out[i] = -1
        elif temperature[i] == 0:
            out[i] = int((row == row.max()).nonzero()[0])
        else:
            kept = _kept((row / temperature[i].to(torch.float64)).softmax(-1), int(top_k[i]), float(top_p[i]), float(min_p[i]))
            running = (kept / kept.sum()).cumsum(-1)
            above = (running > float(uniform[i])).nonzero()
            out[i] = int(above[0]) if len(above) else int(kept.nonzero()[-1])


def _kept(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """``probs`` (float64 ``[vocab]``) with what the filters drop set to 0."""
    ordered, index = probs.sort(descending=True, stable=True)
    count = min(top_k, len(ordered)) if top_k > 0 else len(ordered)
    ordered = ordered[:count] / ordered[:count].sum()
    if top_p < 1:
        count = int((ordered.cumsum(-1) < top_p).sum()) + 1
    ordered = ordered[:count]
    count = int((ordered >= min_p * ordered[0]).sum())
    kept = torch.zeros_like(probs)
    kept[index[:count]] = probs[index[:count]]
    return kept
