"""Captured steps of native kernels: the same bits as eagerly, what cannot be captured, what a graph keeps alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from fitment.graphs import CaptureError
from fitment.weights.group_affine import GroupAffine
from fitment.weights.specs import GroupAffineSpec

native = pytest.importorskip("fitment_cpu._native", reason="fitment-cpu was installed without a compiler")

from fitment_cpu.graph import CpuGraphCapture  # noqa: E402
from fitment_cpu.kernels.embedding import embedding  # noqa: E402
from fitment_cpu.kernels.linear import linear_bf16, linear_fp32, linear_int8  # noqa: E402
from fitment_cpu.kernels.paged_attention import paged_attention  # noqa: E402
from fitment_cpu.kernels.rms_norm import rms_norm  # noqa: E402
from fitment_cpu.kernels.rotary import rotary  # noqa: E402
from fitment_cpu.kernels.sample import sample  # noqa: E402
from fitment_cpu.kernels.silu_mul import silu_mul  # noqa: E402
from fitment_cpu.kernels.weights import PackedWeight, prepare  # noqa: E402
from fitment_cpu.kernels.write_kv import write_kv  # noqa: E402

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCAB, BLOCK, BLOCKS = 128, 4, 2, 32, 192, 301, 32, 6


pytestmark = pytest.mark.usefixtures("native_settings")


def packed(rows: int, cols: int, seed: int) -> PackedWeight:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, cols), generator=random, dtype=torch.uint8)
    scales = torch.rand(rows, cols // 32, generator=random).to(torch.float16) / 40
    return prepare(GroupAffine(GroupAffineSpec(4, 32, "constant"), codes, scales, 8))


class Decoder:
    """One layer of a decoder for ``n`` sequences of one new token each, and a sampled token: every op, over fixed buffers."""

    def __init__(self, n: int) -> None:
        self.table, self.head = packed(VOCAB, HIDDEN, 0), packed(VOCAB, HIDDEN, 1)
        self.qkv_weight, self.o_weight = packed((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN, 2), packed(HIDDEN, HEADS * SIZE, 3)
        self.gate_up_weight, self.down_weight = packed(2 * INNER, HIDDEN, 4), packed(HIDDEN, INNER, 5)
        self.norm = torch.linspace(0.5, 1.5, HIDDEN)
        angles = torch.outer(torch.arange(BLOCK * 4), torch.logspace(0, -3, SIZE // 2))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()
        self.k_cache, self.v_cache = (torch.zeros(BLOCKS, KV_HEADS, BLOCK, SIZE, dtype=torch.bfloat16) for _ in range(2))
        self.ids, self.positions, self.slots, self.seq_lens, self.top_k, self.token = (torch.zeros(n, dtype=torch.int32) for _ in range(6))
        self.block_table = torch.zeros(n, 3, dtype=torch.int32)
        self.cu_query_lens = torch.arange(n + 1, dtype=torch.int32)
        self.temperature, self.top_p, self.min_p, self.uniform = (torch.zeros(n) for _ in range(4))
        self.residual, self.x, self.attended = torch.zeros(n, HIDDEN), torch.zeros(n, HIDDEN), torch.zeros(n, HEADS * SIZE)
        self.qkv, self.gate_up = torch.zeros(n, (HEADS + 2 * KV_HEADS) * SIZE), torch.zeros(n, 2 * INNER)
        self.inner, self.logits = torch.zeros(n, INNER), torch.zeros(n, VOCAB)

    def step(self) -> None:
        n = len(self.ids)
        q, k, v = torch.split(self.qkv.view(n, -1, SIZE), [HEADS, KV_HEADS, KV_HEADS], dim=1)
        embedding(self.ids, self.table, self.residual)
        rms_norm(self.residual, self.norm, 1e-5, self.x)
        linear_bf16(self.x, self.qkv_weight, self.qkv)
        rotary(q, k, self.positions, self.cos_sin)
        write_kv(k, v, self.k_cache, self.v_cache, self.slots)
        paged_attention(q, self.k_cache, self.v_cache, self.block_table, self.cu_query_lens, self.seq_lens, SIZE**-0.5,
                        self.attended.view(n, HEADS, SIZE))
        linear_fp32(self.attended, self.o_weight, self.x)
        rms_norm(self.x, self.norm, 1e-5, self.x, self.residual)
        linear_int8(self.x, self.gate_up_weight, self.gate_up)
        silu_mul(self.gate_up, self.inner)
        linear_fp32(self.inner, self.down_weight, self.x)
        rms_norm(self.x, self.norm, 1e-5, self.x, self.residual)
        linear_bf16(self.x, self.head, self.logits)
        sample(self.logits, self.temperature, self.top_k, self.top_p, self.min_p, self.uniform, self.token)

    def fill(self, position: int, seed: int) -> None:
        """Inputs for tokens at ``position``; sequence s owns blocks s, s + n, s + 2n."""
        n, random = len(self.ids), torch.Generator().manual_seed(seed)
        self.ids.copy_(torch.randint(0, VOCAB, (n,), generator=random))
        self.positions.fill_(position)
        self.block_table.copy_(torch.arange(n)[:, None] + n * torch.arange(3))
        self.slots.copy_(self.block_table[:, position // BLOCK] * BLOCK + position % BLOCK)
        self.seq_lens.fill_(position + 1)
        self.temperature.fill_(0.8)
        self.top_p.fill_(0.9)
        self.uniform.copy_(torch.rand(n, generator=random))

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_replay_gives_the_bits_of_the_eager_step_also_after_inputs_change(n: int, count: int) -> None:
    native.set_num_threads(count)
    eager, captured = Decoder(n), Decoder(n)
    for decoder in (eager, captured):
        decoder.fill(0, seed=0)
    eager.step()
    graph = CpuGraphCapture().capture(captured.step)
    for position in range(70):
        if position:
            for decoder in (eager, captured):
                decoder.fill(position, seed=position)
            eager.step()
            graph.replay()
        for name, value in captured.state().items():
            assert torch.equal(value, eager.state()[name]), (position, name)
    assert captured.logits.isfinite().all()
    assert captured.token.ge(0).all()


def test_the_number_of_threads_may_change_between_capture_and_replay() -> None:
    wanted, captured = Decoder(2), Decoder(2)
    for decoder in (wanted, captured):
        decoder.fill(40, seed=3)
    native.set_num_threads(1)
    wanted.step()
    graph = CpuGraphCapture().capture(captured.step)
    for count in (3, 8, 2, 1):
        native.set_num_threads(count)
        captured.logits.zero_()
        graph.replay()
        assert torch.equal(captured.logits, wanted.logits)


def test_replays_of_two_graphs_take_turns() -> None:
    x, y, z = torch.full((3, 64), 2.0), torch.zeros(3, 32), torch.zeros(3, 16)
    first = CpuGraphCapture().capture(lambda: silu_mul(x, y))
    second = CpuGraphCapture().capture(lambda: silu_mul(y, z))
    x.copy_(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)))
    first.replay()
    second.replay()
    torch.testing.assert_close(y, torch.nn.functional.silu(x[:, :32]) * x[:, 32:])
    torch.testing.assert_close(z, torch.nn.functional.silu(y[:, :16]) * y[:, 16:])


# ---- what is not recorded ----------------------------------------------------------------------------------------------------

def _write_a_slice(x: torch.Tensor) -> None:
    x[0] = 1


def _add_in_place(x: torch.Tensor) -> None:
    x += 1


def _mask_in_place(x: torch.Tensor) -> None:
    x **= 2


@pytest.mark.parametrize(("operation", "name"), [
    (lambda x: x + 1, "add"),
    (lambda x: torch.mul(x, 2), "mul"),
    (lambda x: x.copy_(x), "copy_"),
    (lambda x: x.zero_(), "zero_"),
    (lambda x: torch.add(x, 1, out=x), "add"),
    (lambda x: torch.empty(3), "empty"),
    (lambda x: torch.cat([x, x]), "cat"),
    (lambda x: x.to(torch.bfloat16), "to"),
    (lambda x: x.clone(), "clone"),
    (lambda x: x.index_select(0, torch.tensor([0])), "tensor"),
    (lambda x: x.sum().item(), "sum"),
    (lambda x: torch.nn.functional.relu(x, inplace=True), "relu"),
    (_write_a_slice, "__setitem__"),
    (_add_in_place, "add"),
    (_mask_in_place, "pow"),
])
def test_a_torch_operation_is_refused_by_name(operation: Callable[[torch.Tensor], object], name: str) -> None:
    x, out = torch.ones(2, 8), torch.zeros(2, 4)

    def step() -> None:
        silu_mul(x, out)
        operation(x)

    with pytest.raises(CaptureError, match=name):
        CpuGraphCapture().capture(step)


@pytest.mark.parametrize("read", [lambda x: x[0, 0].item(), lambda x: x.tolist(), lambda x: bool(x[0, 0]), lambda x: int(x[0, 0])])
def test_reading_values_is_refused_since_a_replay_could_not_see_others(read: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2, 8)

    def step() -> None:
        read(x)

    with pytest.raises(CaptureError):
        CpuGraphCapture().capture(step)


def test_views_are_let_through() -> None:
    x, out = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 4)

    def step() -> None:
        rows = x.view(6, 8).unsqueeze(0).squeeze(0)[0:6].view(6, 2, 4).flatten(1)
        assert rows.shape[0] == 6
        assert rows.is_contiguous()
        silu_mul(rows, out[:6])

    graph = CpuGraphCapture().capture(step)
    x.mul_(2)
    graph.replay()
    rows = x.view(6, 8)
    torch.testing.assert_close(out, torch.nn.functional.silu(rows[:, :4]) * rows[:, 4:])


def test_an_error_in_the_step_ends_the_recording() -> None:
    def step() -> None:
        raise KeyError("the step's own")

    with pytest.raises(KeyError, match="the step's own"):
        CpuGraphCapture().capture(step)
    x = torch.ones(1, 8)
    graph = CpuGraphCapture().capture(lambda: silu_mul(x, x[:, :4].view(1, 4)))
    silu_mul(torch.ones(1, 8), torch.zeros(1, 4))
    graph.replay()
    assert torch.equal(x + 0, x)  # torch works as before


def test_captures_do_not_nest() -> None:
    def step() -> None:
        CpuGraphCapture().capture(lambda: None)

    with pytest.raises(CaptureError, match="already"):
        CpuGraphCapture().capture(step)


# ---- what a graph keeps ------------------------------------------------------------------------------------------------------

def test_a_graph_keeps_the_tensors_and_weights_that_its_launches_refer_to() -> None:
    out = torch.zeros(4, 64)
    inputs = [(torch.ones(4, 4096), packed(64, 4096, 0))]
    graph = CpuGraphCapture().capture(lambda: linear_fp32(*inputs[0], out))
    wanted = out.clone()
    watched = weakref.ref(inputs[0][0].untyped_storage())
    inputs.clear()
    gc.collect()
    fillers = [torch.full((4, 4096), torch.nan) for _ in range(64)]
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
    assert watched() is not None
    del graph, fillers
    gc.collect()
    assert watched() is None
