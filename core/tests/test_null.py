"""The null platform end to end, as an engine uses a platform: load, look, select, bind, run, capture, replay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fitment.facts import Facts
from fitment.graphs import GraphCapture
from fitment.hookspecs import PlatformHooks
from fitment.kernels import Speed, load_entry, missing_sources, select, sources_digest
from fitment.null import plugin
from fitment.ops import OPS
from fitment.plugins import Platform, Registry, load
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine
from fitment.weights.specs import GroupAffineSpec

NUM_HEADS, NUM_KV_HEADS, HEAD, HIDDEN, VOCAB = 4, 2, 8, 32, 50
CALL = Facts({"dtype": "fp32", "activations": "fp32", "kv_dtype": "fp32", "head_size": HEAD, "block_size": 16})


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load({"null": "fitment.null.plugin"})


@pytest.fixture(scope="module")
def null(registry: Registry) -> Platform:
    return registry.platforms["null"]


def test_it_loads(registry: Registry, null: Platform) -> None:
    assert [row for row in registry.broken if row.name == "null"] == []
    assert [part.name for part in null.hardware] == ["null", "null-2"]
    (device,) = null.listing.devices
    assert null.listing.reasons == ()
    assert (device.id, device.hardware, device.torch_device) == ("null:0", "null", "cpu")
    assert registry.facts["null.tile_rows"].unit == "rows"


def test_its_device_has_the_facts_of_its_profile(null: Platform) -> None:
    profile, device = null.hardware[0].facts, null.listing.devices[0].facts
    assert {key: device[key] for key in profile} == profile
    assert null.hardware[1].facts == profile | {"arch": "null_2"}


def test_it_is_a_whole_platform() -> None:
    """A vendor who copies it has everything that a platform needs, with every hook."""
    folder = Path(plugin.__file__).parent
    assert {"plugin.py", "detect.py", "hardware.toml", "graph.py"} <= {path.name for path in folder.iterdir()}
    hooks = {name for name in vars(PlatformHooks) if name.startswith("fitment_")}
    assert hooks == {name for name in vars(plugin) if name.startswith("fitment_")}


def test_the_variable_installs_it_without_torch() -> None:
    code = ("import sys; from fitment.plugins import load; null = load().platforms['null']\n"
            "assert null.listing.devices[0].id == 'null:0'\nassert 'torch' not in sys.modules")
    environment = {**os.environ, "FITMENT_PLUGINS": "null=fitment.null.plugin"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_every_op_is_chosen_on_one_part_and_refused_on_the_other(registry: Registry, null: Platform) -> None:
    for op in OPS:
        found = select(op, null.listing.devices[0].facts | CALL, null.kernels, registry.facts)
        assert found.chosen is not None
        assert found.chosen.speed is Speed.REFERENCE
        assert callable(found.chosen.load())
        assert missing_sources(found.chosen) == ()
        assert sources_digest(found.chosen) is not None
        refused = select(op, null.hardware[1].facts | CALL, null.kernels, registry.facts)
        assert refused.chosen is None
        assert [reason.sentence() for reason in refused.reasons] == ["needs arch = null_1; arch is null_2"]


class Step:
    """One decode step of a layer, over fixed buffers, through the ops that selection bound."""

    def __init__(self, registry: Registry, null: Platform, generator: torch.Generator) -> None:
        def bind(op: str) -> Callable[..., None]:
            chosen = select(op, null.listing.devices[0].facts | CALL, null.kernels, registry.facts).chosen
            assert chosen is not None
            return chosen.load()

        def dense(*shape: int) -> Dense:
            return Dense(torch.randn(*shape, generator=generator))

        def affine(rows: int, cols: int) -> GroupAffine:
            codes = torch.randint(0, 16, (rows, cols), generator=generator, dtype=torch.uint8)
            return GroupAffine(GroupAffineSpec(4, 8, "constant", "fp32"), codes, torch.rand(rows, cols // 8, generator=generator) / 10, 8)

        self.ops = {op: bind(op) for op in OPS}
        layout = null.kv_layout
        self.k_cache, self.v_cache = (torch.zeros(layout.shape(order, 3, NUM_KV_HEADS, HEAD)) for order in (layout.k_order, layout.v_order))
        self.table, self.qkv = dense(VOCAB, HIDDEN), affine((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD, HIDDEN)
        self.gate_up, self.down, self.o_proj = affine(128, HIDDEN), affine(HIDDEN, 64), affine(HIDDEN, NUM_HEADS * HEAD)
        self.norm = torch.rand(HIDDEN, generator=generator)
        angles = torch.outer(torch.arange(64.0), 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.ids, self.positions, self.slots, self.seq_lens, self.token = (torch.zeros(1, dtype=torch.int32) for _ in range(5))
        self.block_table = torch.tensor([[2, 0]], dtype=torch.int32)
        self.cu_query_lens = torch.tensor([0, 1], dtype=torch.int32)
        self.x, self.h = torch.empty(1, HIDDEN), torch.empty(1, HIDDEN)
        self.qkv_out, self.attended = torch.empty(1, self.qkv.shape[0]), torch.empty(1, NUM_HEADS, HEAD)
        self.wide, self.narrow, self.logits = torch.empty(1, 128), torch.empty(1, 64), torch.empty(1, VOCAB)
        self.zero, self.one = torch.zeros(1), torch.ones(1)
        self.no_top_k = torch.zeros(1, dtype=torch.int32)

    def feed(self, token: int, position: int) -> None:
        """Set the inputs."""
        self.ids.fill_(token)
        self.positions.fill_(position)
        self.slots.fill_(int(self.block_table[0, position // 16]) * 16 + position % 16)
        self.seq_lens.fill_(position + 1)

    def __call__(self) -> None:
        ops, heads = self.ops, self.qkv_out.view(1, -1, HEAD)
        q, k, v = heads[:, :NUM_HEADS], heads[:, NUM_HEADS:-NUM_KV_HEADS], heads[:, -NUM_KV_HEADS:]
        ops["embedding"](self.ids, self.table, self.x)
        ops["rms_norm"](self.x, self.norm, 1e-5, self.h)
        ops["linear"](self.h, self.qkv, self.qkv_out)
        ops["rotary"](q, k, self.positions, self.cos_sin)
        ops["write_kv"](k, v, self.k_cache, self.v_cache, self.slots)
        ops["paged_attention"](q, self.k_cache, self.v_cache, self.block_table, self.cu_query_lens, self.seq_lens, HEAD**-0.5,
                               self.attended)
        ops["linear"](self.attended.view(1, -1), self.o_proj, self.h)
        ops["rms_norm"](self.h, self.norm, 1e-5, self.h, self.x)
        ops["linear"](self.h, self.gate_up, self.wide)
        ops["silu_mul"](self.wide, self.narrow)
        ops["linear"](self.narrow, self.down, self.h)
        ops["rms_norm"](self.h, self.norm, 1e-5, self.h, self.x)
        ops["linear"](self.h, self.table, self.logits)
        ops["sample"](self.logits, self.zero, self.no_top_k, self.one, self.zero, self.zero, self.token)

    def generate(self, run: Callable[[], None], first: int, count: int) -> torch.Tensor:
        """The logits behind each greedy token after ``first``: ``[count, VOCAB]``."""
        self.k_cache.zero_()
        self.v_cache.zero_()
        self.token.fill_(first)
        logits = []
        for position in range(count):
            self.feed(int(self.token), position)
            run()
            assert int(self.token) == int(self.logits.argmax())
            logits.append(self.logits.clone())
        return torch.cat(logits)


def test_a_captured_step_gives_what_the_eager_one_gives(registry: Registry, null: Platform) -> None:
    step = Step(registry, null, torch.Generator().manual_seed(11))
    eager = step.generate(step, first=7, count=20)  # into the second block
    assert eager.isfinite().all()
    assert len({tuple(row) for row in eager.tolist()}) == 20  # what came before matters
    assert null.graph_capture is not None
    capture: Any = load_entry(null.graph_capture)()
    assert isinstance(capture, GraphCapture)
    graph = capture.capture(step)
    assert torch.equal(step.generate(graph.replay, first=7, count=20), eager)
    assert torch.equal(step.generate(graph.replay, first=8, count=3), step.generate(step, first=8, count=3))
    assert null.abilities["graph_capture"].check(null.listing.devices[0].facts, registry.facts) == ()
