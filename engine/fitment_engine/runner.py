"""Runs steps: fills the batch, computes the model eagerly or replays a captured graph, gives logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import torch

from fitment.dtypes import torch_dtype
from fitment.formats import Checkpoint
from fitment.graphs import Graph, GraphCapture
from fitment.kernels import load_entry
from fitment_engine.batch import Batch
from fitment_engine.binding import Binder, Progress
from fitment_engine.models import ARCHITECTURES
from fitment_engine.sequence import Sequence
from fitment_matrix.gate import Plan

LOGITS_ROWS = 64
"""Rows of logits computed at once when every token's are wanted."""


class Runner:
    """A plan made real: weights, cache, buffers, graphs."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        self.plan = plan
        binder = Binder(plan, checkpoint, progress)
        self.device = binder.device
        model, layout = plan.request.model, plan.kv_layout
        factory = load_entry(ARCHITECTURES[model.architecture])
        self._model = factory(model, binder, plan.max_batch_tokens, torch_dtype(plan.dtype))
        cache_dtype = torch_dtype(plan.kv_dtype)
        shapes = [layout.shape(order, plan.num_blocks, model.num_kv_heads, model.head_size) for order in (layout.k_order, layout.v_order)]
        self._caches = [
            (torch.empty(shapes[0], dtype=cache_dtype, device=self.device), torch.empty(shapes[1], dtype=cache_dtype, device=self.device))
            for _ in range(model.num_layers)
        ]
        max_blocks = -(-plan.max_model_len // layout.block_size)
        self._batch = Batch(plan.max_batch_tokens, plan.max_num_seqs, max_blocks, layout.block_size, self.device)
        rows = max(plan.max_num_seqs, LOGITS_ROWS)
        self._logits = torch.empty(rows, model.vocab_size, dtype=torch.float32, device=self.device)
        self._capture: GraphCapture | None = None
        if plan.graph_batch_sizes:
            assert plan.platform.graph_capture is not None
            self._capture = load_entry(plan.platform.graph_capture)()
        self._graphs: dict[int, Graph] = {}
        self.sample: Callable[..., None] = binder.op("sample")

    def run(self, scheduled: Seq[tuple[Sequence, int]]) -> torch.Tensor:
        """Compute a step.

        Returns:
            The logits of each sequence's last computed token, fp32 ``[len(scheduled), vocab]``: a view that the next step overwrites.
        """
        used = len(scheduled)
        if all(count == 1 for _, count in scheduled):
            size = next((size for size in self.plan.graph_batch_sizes if size >= used), None)
            self._batch.fill(scheduled, padded_seqs=size or 0)
            if size is None:
                self._decode(used)
            else:
                self._replay(size)
            return self._logits[:used]
        hidden = self._prefill(scheduled)
        ends = self._batch.cu_query_lens[1 : used + 1].to(torch.int64) - 1
        self._model.logits(hidden.index_select(0, ends), self._logits[:used])
        return self._logits[:used]

    def run_all_logits(self, scheduled: Seq[tuple[Sequence, int]]) -> Iterator[tuple[int, torch.Tensor]]:
        """Compute a step; yields ``(first row, logits)`` for every token of it, a slice of rows at a time."""
        hidden = self._prefill(scheduled)
        for start in range(0, hidden.shape[0], LOGITS_ROWS):
            rows = hidden[start : start + LOGITS_ROWS]
            out = self._logits[: rows.shape[0]]
            self._model.logits(rows, out)
            yield start, out

    def _prefill(self, scheduled: Seq[tuple[Sequence, int]]) -> torch.Tensor:
        self._batch.fill(scheduled)
        hidden: torch.Tensor = self._model.forward(self._batch, sum(count for _, count in scheduled), len(scheduled), self._caches)
        return hidden

    def _decode(self, size: int) -> None:
        """One token for each of ``size`` sequences; what a graph captures."""
        hidden = self._model.forward(self._batch, size, size, self._caches)
        self._model.logits(hidden, self._logits[:size])

    def _replay(self, size: int) -> None:
        graph = self._graphs.get(size)
        if graph is None:
            assert self._capture is not None
            self._graphs[size] = self._capture.capture(lambda: self._decode(size))
        else:
            graph.replay()
