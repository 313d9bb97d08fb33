"""Write, then read: what ``write_kv`` lays down step by step is what ``paged_attention`` finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fitment.conformance._buffers import Buffer, Buffers
from fitment.conformance.checks import Bench, report
from fitment.dtypes import torch_dtype
from fitment.facts import Facts
from fitment.hardware import KVLayout
from fitment.kernels import GraphSafety, Kernel
from fitment.ops._cases._case import Arg, Call, Role
from fitment.ops._cases._compare import difference
from fitment.ops._cases._data import Draw
from fitment.ops._cases._paged import block_table, cache_dtypes, cache_facts, causal, empty_cache, num_blocks, slots
from fitment.ops._cases.paged_attention import tolerance

HEADS = ((9, 3, 64), (4, 1, 128))
"""Query heads, key-value heads, head size."""

DECODE = (1, 1, 1)


@dataclass(frozen=True)
class RoundTrip:
    """Three sequences that grow: prompts in two pieces, then a token each, five times.

    ``steps`` are the tokens that each sequence gets.
    """

    heads: tuple[int, int, int]
    dtype: str
    kv_dtype: str
    layout: KVLayout

    @property
    def name(self) -> str:
        """``h9-3-d64/fp32-kv-bf16``."""
        num_heads, num_kv_heads, size = self.heads
        return f"h{num_heads}-{num_kv_heads}-d{size}/{self.dtype}-kv-{self.kv_dtype}"

    @property
    def steps(self) -> tuple[tuple[int, int, int], ...]:
        """The last prompt ends just before the end of a block, so that the tokens that follow cross it."""
        block = self.layout.block_size
        return ((block + 3, 5, 1), (block, 0, 2 * block - 4), *(DECODE,) * 5)

    def facts(self) -> Iterator[Facts]:
        """The facts of the calls: of the longest queries, and of single tokens."""
        num_heads, num_kv_heads, size = self.heads
        for query_length in (max(map(max, self.steps)), 1):
            yield cache_facts(self.dtype, self.kv_dtype, self.layout, size, num_heads // num_kv_heads) | {"query_length": query_length}


def round_trips(layout: KVLayout) -> Iterator[RoundTrip]:
    """Every cache dtype of the layout, from every dtype."""
    for heads in HEADS:
        for dtype in ("fp32", "bf16", "fp16"):
            for kv_dtype in cache_dtypes(layout):
                yield RoundTrip(heads, dtype, kv_dtype, layout)


class _Conversation:
    """The values of a round trip, and the calls that are made of them."""

    def __init__(self, trip: RoundTrip) -> None:
        self._trip = trip
        self._lengths = [sum(counts) for counts in zip(*trip.steps, strict=True)]
        draw = Draw(trip.name, 0)
        num_heads, num_kv_heads, size = trip.heads
        self._q, self._k, self._v = ([draw.normal(length, heads, size, dtype=trip.dtype) for length in self._lengths]
                                     for heads in (num_heads, num_kv_heads, num_kv_heads))
        self._table = block_table(draw, self._lengths, trip.layout.block_size)
        self.scale = size**-0.5

    def caches(self, device: torch.device) -> tuple[Buffer, Buffer]:
        """Caches of NaN in the platform's layout."""
        layout, (_, num_kv_heads, size) = self._trip.layout, self._trip.heads
        empty = empty_cache(num_blocks(self._lengths, layout.block_size), layout, num_kv_heads, size, self._trip.kv_dtype)
        k_cache, v_cache = (Buffer(Arg(empty, Role.INOUT, order=order), device, False) for order in (layout.k_order, layout.v_order))
        return k_cache, v_cache

    def _spans(self, step: int) -> list[tuple[int, int]]:
        """Of each sequence, the first token of a step and the one after the last."""
        steps = self._trip.steps
        done = [sum(counts[i] for counts in steps[:step]) for i in range(len(self._lengths))]
        return [(start, start + count) for start, count in zip(done, steps[step], strict=True)]

    def call(self, step: int) -> Call:
        """The arguments of both ops at a step, but for the caches."""
        spans = self._spans(step)
        block_size = self._trip.layout.block_size
        mapping = torch.cat([slots(self._table, i, *span, block_size) for i, span in enumerate(spans)]).to(torch.int32)
        bounds = torch.tensor((0, *(stop - start for start, stop in spans))).cumsum(0).to(torch.int32)
        q, k, v = (torch.cat([rows[start:stop] for rows, (start, stop) in zip(values, spans, strict=True)])
                   for values in (self._q, self._k, self._v))
        return {"q": Arg(q, is_strided=True), "k": Arg(k, is_strided=True), "v": Arg(v, is_strided=True), "slot_mapping": Arg(mapping),
                "block_table": Arg(self._table), "cu_query_lens": Arg(bounds),
                "seq_lens": Arg(torch.tensor([stop for _, stop in spans], dtype=torch.int32)),
                "out": Arg(torch.empty_like(q), Role.OUT, is_strided=True)}

    def want(self, step: int) -> torch.Tensor:
        """What a step's queries must give: float64, from the values rounded to the cache's dtype."""
        kept = torch_dtype(self._trip.kv_dtype)
        return torch.cat([causal(q[start:stop], k[:stop].to(kept), v[:stop].to(kept), self.scale)
                          for q, k, v, (start, stop) in zip(self._q, self._k, self._v, self._spans(step), strict=True)])


def check_reads_back(bench: Bench, write: Kernel, attention: Kernel, trip: RoundTrip) -> None:
    """At every step the queries see just the keys and values that were written for their sequence, eager and replayed.

    Raises:
        Nonconformance: they do not.
    """
    conversation = _Conversation(trip)
    problems = list(_run(bench, write, attention, conversation, trip, is_captured=False))
    if bench.capture is not None and GraphSafety.NEVER not in (write.graph_safe, attention.graph_safe):
        problems += _run(bench, write, attention, conversation, trip, is_captured=True)
    report(f"{write.name} and {attention.name} on {trip.name}", problems)


def _run(bench: Bench, write: Kernel, attention: Kernel, conversation: _Conversation, trip: RoundTrip, is_captured: bool) -> Iterator[str]:
    caches = conversation.caches(bench.torch_device)
    replay: Callable[[], None] | None = None
    buffers = Buffers(conversation.call(0), {}, bench.torch_device, is_strided=True)
    for step, counts in enumerate(trip.steps):
        call = conversation.call(step)
        if replay is None:
            buffers = Buffers(call, {}, bench.torch_device, is_strided=True)
            run = _step(write, attention, buffers, caches, conversation.scale)
            if is_captured and counts == DECODE and bench.capture is not None:
                replay = bench.capture.capture(run).replay
            else:
                run()
        if replay is not None:
            buffers.load(call)
            replay()
        got, _ = buffers.outputs()["out"]
        words = f"step {step}{', replayed' if replay else ''}"
        problem = difference(got, conversation.want(step), tolerance(next(trip.facts())))
        yield from (f"{words}: {problem}" for problem in (*((f"out: {problem}",) if problem else ()), *buffers.problems()))


def _step(write: Kernel, attention: Kernel, buffers: Buffers, caches: tuple[Buffer, Buffer], scale: float) -> Callable[[], None]:
    write_entry, attention_entry = write.load(), attention.load()
    k_cache, v_cache = (cache.view for cache in caches)

    def run() -> None:
        write_entry(buffers["k"], buffers["v"], k_cache, v_cache, buffers["slot_mapping"])
        attention_entry(buffers["q"], k_cache, v_cache, buffers["block_table"], buffers["cu_query_lens"], buffers["seq_lens"], scale,
                        buffers["out"])

    return run
