"""Continuous batching over a paged cache: which sequences compute how many tokens in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fitment_engine.sequence import Sequence


class BlockPool:
    """The cache's free blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give ``seq`` the blocks for its first ``num_tokens`` tokens; False, and nothing given, when there are too few."""
        missing = -(-num_tokens // self.block_size) - len(seq.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            seq.blocks.append(self._free.pop())
        return True

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of ``seq``."""
        self._free.extend(reversed(seq.blocks))
        seq.blocks.clear()


class Scheduler:
    """First come, first served: running sequences first, then waiting ones, prompts in chunks within the step's token budget.

    When blocks run out, the sequence that came last gives all of its own back and computes them again later.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_batch_tokens: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, seqs: Iterable[Sequence]) -> None:
        """Queue new sequences."""
        self.waiting.extend(seqs)

    def schedule(self) -> list[tuple[Sequence, int]]:
        """The next step: sequences and how many of their pending tokens each computes; their blocks are allocated."""
        scheduled: list[tuple[Sequence, int]] = []
        budget = self._max_batch_tokens
        num_running, i = len(self.running), 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            behind = len(self.running) - i - 1  # each keeps room for one token, so that a long prompt stalls nobody
            count = min(seq.num_pending, max(budget - behind, 1))
            if self._grow_or_preempt(seq, count):
                scheduled.append((seq, count))
                budget -= count
                i += 1
        was_preempted = len(self.running) < num_running
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs and not was_preempted:
            seq = self.waiting[0]
            count = min(seq.num_pending, budget)
            if not self._pool.grow(seq, seq.num_computed + count):
                break
            self.running.append(self.waiting.popleft())
            scheduled.append((seq, count))
            budget -= count
        return scheduled

    def _grow_or_preempt(self, seq: Sequence, count: int) -> bool:
        """Allocate for ``seq``; while blocks lack, the last running sequence is preempted. False when that was ``seq`` itself."""
        while not self._pool.grow(seq, seq.num_computed + count):
            victim = self.running.pop()
            self._pool.release(victim)
            victim.num_computed = 0
            victim.num_preempted += 1
            self.waiting.appendleft(victim)
            if victim is seq:
                return False
        return True

    def remove_finished(self) -> None:
        """Drop finished sequences and take back their blocks."""
        for seq in self.running:
            if seq.is_finished:
                self._pool.release(seq)
        self.running = [seq for seq in self.running if not seq.is_finished]
        if any(seq.is_finished for seq in self.waiting):
            self.waiting = deque(seq for seq in self.waiting if not seq.is_finished)
