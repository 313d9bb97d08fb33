"""What the ops on the cache have in common: caches that are NaN where nothing was written, blocks in no order."""

from __future__ import annotations

import torch

from fitment.dtypes import torch_dtype
from fitment.facts import Facts
from fitment.hardware import KVLayout
from fitment.ops._cases._compare import ROUNDING
from fitment.ops._cases._data import Draw

CACHE_DTYPES = tuple(ROUNDING)
"""Cache dtypes that the contracts say how to write: by rounding alone, without scales."""

GARBAGE = -1515870811
"""What stands in a block table past a sequence's length: 0xA5A5A5A5, no block of any cache."""

SPARE = 3
"""Blocks of a cache that no sequence has."""


def cache_dtypes(layout: KVLayout) -> tuple[str, ...]:
    """Those of a layout's dtypes for which there are cases."""
    return tuple(dtype for dtype in layout.dtypes if dtype in CACHE_DTYPES)


def cache_facts(dtype: str, kv_dtype: str, layout: KVLayout, head_size: int, query_per_kv: int) -> Facts:
    """The facts of a call on the cache."""
    return Facts({"dtype": dtype, "kv_dtype": kv_dtype, "block_size": layout.block_size, "head_size": head_size,
                  "query_per_kv": query_per_kv})


def empty_cache(num_blocks: int, layout: KVLayout, num_kv_heads: int, head_size: int, kv_dtype: str) -> torch.Tensor:
    """A cache ``[block, slot, head, dim]`` of NaN."""
    return torch.full((num_blocks, layout.block_size, num_kv_heads, head_size), torch.nan, dtype=torch_dtype(kv_dtype))


def block_table(draw: Draw, lengths: list[int], block_size: int) -> torch.Tensor:
    """int32 ``[num_seqs, max_blocks + 1]``: different blocks, shuffled, for sequences of ``lengths`` tokens; garbage behind them."""
    counts = [-(-length // block_size) for length in lengths]
    blocks = draw.shuffled(sum(counts) + SPARE)
    table = torch.full((len(lengths), max(counts, default=0) + 1), GARBAGE, dtype=torch.int32)
    start = 0
    for i, count in enumerate(counts):
        table[i, :count] = blocks[start : start + count]
        start += count
    return table


def num_blocks(lengths: list[int], block_size: int) -> int:
    """Blocks of a cache whose table is a :func:`block_table`."""
    return sum(-(-length // block_size) for length in lengths) + SPARE


def slots(table: torch.Tensor, sequence: int, start: int, stop: int, block_size: int) -> torch.Tensor:
    """int64: the slots of a sequence's tokens ``[start, stop)``."""
    positions = torch.arange(start, stop)
    return table[sequence, positions // block_size].long() * block_size + positions % block_size


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention in float64, a query head at a time.

    Args:
        q: ``[ql, num_heads, head_size]``: the last ``ql`` of the sequence's tokens.
        k: ``[length, num_kv_heads, head_size]``.
        v: Likewise.
        scale: Factor on the scores.

    Returns:
        float64, like ``q``.
    """
    q, k, v = q.to(torch.float64), k.to(torch.float64), v.to(torch.float64)
    group = q.shape[1] // k.shape[1]
    future = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        scores = (q[:, head] @ k[:, head // group].T * scale).masked_fill(future, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out[:, head] = weights @ v[:, head // group] / weights.sum(-1, keepdim=True)
    return out
