"""Cases of ``paged_attention``: decode, prefill, chunks, verification, all of them in one batch, and a needle in 100K tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fitment.facts import Facts
from fitment.hardware import KVLayout
from fitment.kernels import GraphSafety
from fitment.ops._cases._case import Arg, Call, Case, Expected, Role, tensor
from fitment.ops._cases._compare import Close
from fitment.ops._cases._data import Draw
from fitment.ops._cases._paged import (
    block_table,
    cache_dtypes,
    cache_facts,
    causal,
    empty_cache,
    num_blocks,
    slots,
)

NARROW = {"fp32": 1e-9, "fp16": 4e-7, "bf16": 1.5e-5}
"""NMSE where the narrower of activations and cache is this: queries, probabilities and output are rounded to it once."""

HEADS = ((9, 3, 64), (8, 1, 128), (4, 4, 80), (2, 1, 256), (6, 2, 96), (16, 2, 64), (1, 1, 8), (3, 1, 33), (5, 5, 40))
"""Query heads, key-value heads, head size."""

NEEDLE_LENGTH = 131072 + 7


def tolerance(facts: Facts) -> float:
    """Greatest NMSE of a call."""
    return max(NARROW[str(facts["dtype"])], NARROW[str(facts["kv_dtype"])])


@dataclass(frozen=True)
class Batch:
    """Query tokens and length of each sequence; ``padding`` are rows of q and out that belong to none."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    padding: int = 0
    score_scale: float = 1.0

    @property
    def query_lens(self) -> tuple[int, ...]:
        """The query tokens of each sequence."""
        return tuple(count for count, _ in self.sequences)

    @property
    def safety(self) -> GraphSafety:
        """How graph-safe a kernel must be for this batch."""
        lens = set(self.query_lens)
        return GraphSafety.SINGLE_TOKEN if lens == {1} else GraphSafety.UNIFORM_BATCH if len(lens) == 1 else GraphSafety.ALWAYS

    def of_seed(self, seed: int) -> tuple[tuple[int, int], ...]:
        """The sequences for a seed: for 1, in the opposite order and shorter, with the same number of query tokens."""
        if not seed:
            return self.sequences
        return tuple((count, max(count, length - 3) if length else 0) for count, length in reversed(self.sequences))


def batches(block_size: int) -> Iterator[Batch]:
    """The batches, with lengths about the edges of blocks."""
    b = block_size
    yield Batch("decode", ((1, 1), (1, b - 1), (1, b), (1, b + 1), (1, 3 * b + 5)))
    yield Batch("decode-one", ((1, 2 * b + 3),))
    yield Batch("decode-padded", ((1, 5), (1, 0), (1, b + 2), (1, 0)))
    yield Batch("decode-long", ((1, 2000), (1, 3)))
    yield Batch("prefill", ((1, 1), (7, 7), (b + 3, b + 3), (2 * b, 2 * b)))
    yield Batch("chunk", ((5, 20), (b, 3 * b + 1), (64, 700)))
    yield Batch("verify", ((4, 4), (4, b + 1), (4, 2 * b), (4, 100)))
    yield Batch("mixed", ((17, 17), (1, 40), (0, 10), (3, b + 2), (1, 0)), padding=3)
    yield Batch("peaked", ((1, 90), (9, 50)), score_scale=8.0)
    yield Batch("nothing", ())


def cases(layout: KVLayout) -> Iterator[Case]:
    """Every batch with the first shape of heads and all dtypes; the other shapes decode and mix; needles."""
    every = [(dtype, kv_dtype) for dtype in ("fp32", "bf16", "fp16") for kv_dtype in cache_dtypes(layout)]
    for batch in batches(layout.block_size):
        for heads in HEADS if batch.name in ("decode", "mixed") else HEADS[:2]:
            for dtype, kv_dtype in every:
                yield _case(batch, heads, dtype, kv_dtype, layout)
    for kv_dtype in cache_dtypes(layout):
        yield _needle((4, 1, 64), kv_dtype, layout)


def _case(batch: Batch, heads: tuple[int, int, int], dtype: str, kv_dtype: str, layout: KVLayout) -> Case:
    num_heads, num_kv_heads, size = heads
    name = f"{batch.name}-h{num_heads}-{num_kv_heads}-d{size}/{dtype}-kv-{kv_dtype}"
    facts = _facts(dtype, kv_dtype, layout, heads, max(batch.query_lens, default=1))
    most = [length for _, length in batch.sequences]

    def build(seed: int) -> Call:
        draw = Draw(name, seed)
        sequences = batch.of_seed(seed)
        table = block_table(draw, most[::-1] if seed else most, layout.block_size)
        lengths = [length for _, length in sequences]
        k_cache, v_cache = (_filled(draw, table, lengths, num_blocks(most, layout.block_size), heads, kv_dtype, layout) for _ in "kv")
        q = draw.normal(sum(batch.query_lens) + batch.padding, num_heads, size, dtype=dtype, scale=batch.score_scale)
        return _call(q, k_cache, v_cache, table, sequences, layout)

    return Case(name, facts, build, lambda call: _expect(call, layout, tolerance(facts)), batch.safety)


def _needle(heads: tuple[int, int, int], kv_dtype: str, layout: KVLayout) -> Case:
    """Every query head has one key among all the tokens that it matches: past 65536, the last, the first, one between."""
    num_heads, num_kv_heads, size = heads
    name = f"needle-{NEEDLE_LENGTH}-h{num_heads}-{num_kv_heads}-d{size}/{kv_dtype}-kv-{kv_dtype}"
    facts = _facts(kv_dtype, kv_dtype, layout, heads, 1)
    lengths = [NEEDLE_LENGTH]

    def build(seed: int) -> Call:
        draw = Draw(name, seed)
        table = block_table(draw, lengths, layout.block_size)
        count = num_blocks(lengths, layout.block_size)
        k_cache, v_cache = (_filled(draw, table, lengths, count, heads, kv_dtype, layout) for _ in "kv")
        q = draw.normal(1, num_heads, size, dtype=kv_dtype)
        places = torch.tensor((65536 + layout.block_size, NEEDLE_LENGTH - 1, 0, NEEDLE_LENGTH // 3)[:num_heads])
        k_cache.flatten(0, 1)[slots(table, 0, 0, NEEDLE_LENGTH, layout.block_size)[places], 0] = 4 * q[0]
        return _call(q, k_cache, v_cache, table, ((1, NEEDLE_LENGTH),), layout)

    return Case(name, facts, build, lambda call: _expect(call, layout, tolerance(facts)))


def _facts(dtype: str, kv_dtype: str, layout: KVLayout, heads: tuple[int, int, int], query_length: int) -> Facts:
    return cache_facts(dtype, kv_dtype, layout, heads[2], heads[0] // heads[1]) | {"query_length": query_length}


def _filled(draw: Draw, table: torch.Tensor, lengths: list[int], count: int, heads: tuple[int, int, int], kv_dtype: str,
            layout: KVLayout) -> torch.Tensor:
    """A cache of ``count`` blocks that holds normal values for the sequences' tokens and NaN elsewhere."""
    cache = empty_cache(count, layout, heads[1], heads[2], kv_dtype)
    for i, length in enumerate(lengths):
        cache.flatten(0, 1)[slots(table, i, 0, length, layout.block_size)] = draw.normal(length, *heads[1:], dtype=kv_dtype)
    return cache


def _call(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
          sequences: tuple[tuple[int, int], ...], layout: KVLayout) -> Call:
    bounds = torch.tensor((0, *(count for count, _ in sequences))).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([length for _, length in sequences], dtype=torch.int32)
    return {"q": Arg(q, is_strided=True), "k_cache": Arg(k_cache, order=layout.k_order), "v_cache": Arg(v_cache, order=layout.v_order),
            "block_table": Arg(table), "cu_query_lens": Arg(bounds), "seq_lens": Arg(seq_lens), "scale": q.shape[2] ** -0.5,
            "out": Arg(torch.empty_like(q), Role.OUT, is_strided=True)}


def _expect(call: Call, layout: KVLayout, tolerance: float) -> Mapping[str, Expected]:
    q, table = tensor(call, "q"), tensor(call, "block_table")
    k_cache, v_cache = tensor(call, "k_cache").flatten(0, 1), tensor(call, "v_cache").flatten(0, 1)
    bounds, scale = tensor(call, "cu_query_lens").tolist(), call["scale"]
    assert isinstance(scale, float)
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, length in enumerate(tensor(call, "seq_lens").tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        if length and bounds[i] < bounds[i + 1]:
            where = slots(table, i, 0, length, layout.block_size)
            out[rows] = causal(q[rows], k_cache[where], v_cache[where], scale)
    kept = (torch.arange(q.shape[0]) >= bounds[-1]).view(-1, 1, 1)
    return {"out": Close(out, tolerance, kept)}
