"""Replayed decode steps against eager ones, over many steps in which requests join, end, are aborted and are preempted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fitment.formats import recognise
from fitment.plugins import load
from fitment_engine import LLM, SamplingParams
from fitment_engine.llm import admit_here
from support import EXACT, TINY

STEPS = 2000


def pair(**options: Any) -> tuple[LLM, LLM]:
    """The tiny model with graphs and without."""
    plan = admit_here(recognise(TINY), load(), **options)
    if not plan.graph_batch_sizes:
        pytest.skip(f"{plan.platform.name} captures no graphs here")
    return (LLM.from_plan(recognise(TINY), plan),
            LLM.from_plan(recognise(TINY), dataclasses.replace(plan, graph_batch_sizes=())))


def logits_seen(llm: LLM) -> Callable[[], torch.Tensor | None]:
    """Keeps each step's logits; returns a function that gives the last ones."""
    runner = llm.engine._runner
    run = runner.run
    seen: list[torch.Tensor | None] = [None]

    def keep(scheduled: Any) -> torch.Tensor:
        logits = run(scheduled)
        seen[0] = logits.clone()
        return logits

    runner.run = keep  # type: ignore[method-assign]
    return lambda: seen[0]


@pytest.mark.parametrize("options", [EXACT, {"activations": "bf16", "kv_dtype": "bf16"}], ids=["fp32", "bf16"])
def test_graphs_and_eager_steps_agree_bit_for_bit(options: dict[str, Any]) -> None:
    token_bytes = 2 * 2 * 2 * 16 * (4 if options["kv_dtype"] == "fp32" else 2)  # keys and values, layers, heads, elements
    graphs, eager = pair(**options, max_model_len=128, max_num_seqs=7, max_batch_tokens=48, kv_memory_bytes=12 * 32 * token_bytes)
    both = (graphs.engine, eager.engine)
    last = logits_seen(graphs), logits_seen(eager)
    rng = random.Random(5)
    alive: list[str] = []
    finished: list[dict[str, list[int]]] = [{}, {}]
    preempted = 0
    for step in range(STEPS):
        if len(alive) < 12 and rng.random() < 0.3:
            prompt = [rng.randrange(1, 320) for _ in range(rng.randint(1, 60))]
            params = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=step, max_tokens=rng.randint(1, 60), ignore_eos=True)
            for engine in both:
                engine.add_request(str(step), None, prompt, params)
            alive.append(str(step))
        if alive and rng.random() < 0.02:
            gone = alive.pop(rng.randrange(len(alive)))
            for engine in both:
                engine.abort([gone])
        for results, engine in zip(finished, both, strict=True):
            for output in engine.step():
                if output.finished:
                    results[output.request_id] = output.outputs[0].token_ids
        a, b = last[0](), last[1]()
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a, b), f"step {step}"
        alive = [request_id for request_id in alive if request_id not in finished[0]]
        preempted += sum(seq.num_preempted for seq in graphs.engine._scheduler.waiting)
    assert finished[0] == finished[1]
    assert len(finished[0]) > 50
    assert preempted > 0, "the cache was never too small, and preemption was not tried"
