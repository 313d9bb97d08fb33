"""The inputs of one step, in fixed buffers that captured graphs refer to."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from fitment_engine.sequence import Sequence


class Batch:
    """Preallocated int32 inputs of a step, filled on the host.

    Attributes:
        ids: ``[max_tokens]`` token ids.
        positions: ``[max_tokens]``.
        slot_mapping: ``[max_tokens]``; -1 writes nothing.
        block_table: ``[max_seqs, max_blocks]``.
        cu_query_lens: ``[max_seqs + 1]``.
        seq_lens: ``[max_seqs]``.
    """

    def __init__(self, max_tokens: int, max_seqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._views: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]] = []
        self.ids = self._buffer(max_tokens)
        self.positions = self._buffer(max_tokens)
        self.slot_mapping = self._buffer(max_tokens)
        self.block_table = self._buffer(max_seqs, max_blocks)
        self.cu_query_lens = self._buffer(max_seqs + 1)
        self.seq_lens = self._buffer(max_seqs)

    def _buffer(self, *shape: int) -> torch.Tensor:
        host = torch.zeros(shape, dtype=torch.int32)
        self._views.append(host.numpy())
        device = host.to(self._device)  # the same tensor where the device is the host
        if device is not host:
            self._copies.append((device, host))
        return device

    def fill(self, scheduled: Seq[tuple[Sequence, int]], padded_seqs: int = 0) -> None:
        """Write the inputs of a step.

        Args:
            scheduled: Each sequence and the number of its tokens to compute, from ``num_computed`` on; their blocks are allocated.
            padded_seqs: At least so many sequences are written, the others of one token each that writes nothing and sees nothing.
        """
        ids, positions, slots, tables, cu_query_lens, seq_lens = self._views
        start = 0
        for i, (seq, count) in enumerate(scheduled):
            begin, end = seq.num_computed, seq.num_computed + count
            stop = start + count
            if count == 1:
                ids[start], positions[start] = seq.token_ids[begin], begin
                slots[start] = seq.blocks[begin // self._block_size] * self._block_size + begin % self._block_size
            else:
                span = np.arange(begin, end, dtype=np.int32)
                ids[start:stop], positions[start:stop] = seq.token_ids[begin:end], span
                blocks = np.asarray(seq.blocks, dtype=np.int32)
                slots[start:stop] = blocks[span // self._block_size] * self._block_size + span % self._block_size
            tables[i, : len(seq.blocks)] = seq.blocks
            cu_query_lens[i], seq_lens[i] = start, end
            start = stop
        used = len(scheduled)
        cu_query_lens[used] = start
        for i in range(used, padded_seqs):
            ids[start], positions[start], slots[start] = 0, 0, -1
            seq_lens[i], start = 0, start + 1
            cu_query_lens[i + 1] = start
        for device, host in self._copies:
            device.copy_(host, non_blocking=True)
