"""The gate's arithmetic on memory, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitment.kernels import Kernel, Speed
from fitment.plugins import Registry
from fitment.weights.specs import GroupAffineSpec
from fitment_matrix._memory import gib
from fitment_matrix.gate import Plan, Request, Unfit, admit
from fitment_matrix.testing import MODEL, all_kernels, isolate, make_request, plugin, register

BLOCK = 2 * 2 * 16 * 2 * 16 * 2
"""Bytes of a block: keys and values, 2 layers, 16 tokens, 2 heads of 16 elements, bf16."""

TABLES = 2 * 320 * 64 * 2
LAYER = (64 * 64 + 32 * 64 + 32 * 64 + 64 * 64 + 3 * 128 * 64) * 2 + 2 * 64 * 4
WEIGHTS = TABLES + 2 * LAYER + 64 * 4
WORK = 2048 * (64 + 64 + (4 + 2 + 2) * 16 + 4 * 16 + 2 * 128 + 128) * 2 + 64 * 320 * 4
"""Buffers of a step in bf16 (residual, normalised, q k v, attended, gate and up, activated), and logits in fp32."""

ROPE = 16 * 16 * 4
"""Cosines and sines of a block's 16 positions."""


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)


def memory(total: int | None, speed: Speed = Speed.PORTABLE) -> Registry:
    """A platform with so much memory."""
    return register(plugin("toy", all_kernels("toy", speed), {"toy-1": {} if total is None else {"memory_bytes": total}}))


def planned(request: Request, total: int | None, speed: Speed = Speed.PORTABLE) -> Plan:
    registry = memory(total, speed)
    return admit(request, registry.hardware["toy-1"], registry)


def total_for(blocks: int) -> int:
    """The least memory of which nine tenths hold the weights, the work and so many blocks."""
    need = WEIGHTS + WORK + blocks * (BLOCK + ROPE)
    total = need * 10 // 9
    while int(total * 0.9) < need:
        total += 1
    return total


def test_weights_cache_and_work_are_the_sums_done_by_hand() -> None:
    plan = planned(make_request(), 1 << 30)
    assert (BLOCK, WEIGHTS, WORK) == (4096, 230656, 2965504)
    assert plan.memory.weights == WEIGHTS
    assert plan.memory.work == WORK + 32 * ROPE
    assert plan.num_blocks == 64 * 32, "64 sequences of 512 tokens"
    assert plan.memory.cache == plan.num_blocks * BLOCK
    assert plan.memory.total == plan.memory.weights + plan.memory.cache + plan.memory.work
    assert plan.memory.usable == int(0.9 * (1 << 30))


def test_packed_codes_and_scales_are_counted() -> None:
    affine = GroupAffineSpec(4, 32, "minimums", "fp16")
    elements = 2 * 320 * 64 + 2 * (64 * 64 + 32 * 64 + 32 * 64 + 64 * 64 + 3 * 128 * 64)
    vectors = (2 * 2 + 1) * 64 * 4
    assert planned(make_request(affine), 1 << 30).memory.weights == elements // 2 + elements // 32 * 4 + vectors


def test_a_kernel_that_does_not_pack_keeps_a_byte_a_code() -> None:
    affine = GroupAffineSpec(4, 32, "constant", "fp16")
    kernels = [replace(kernel, prepare=None) for kernel in all_kernels("toy")]
    registry = register(plugin("toy", kernels, {"toy-1": {}}))
    elements = 2 * 320 * 64 + 2 * (64 * 64 + 32 * 64 + 32 * 64 + 64 * 64 + 3 * 128 * 64)
    found = admit(make_request(affine), registry.hardware["toy-1"], registry).memory.weights
    assert found == elements + elements // 32 * 2 + 5 * 64 * 4


@pytest.mark.parametrize(("prepare", "copies"), [("made_up_kernels:pack", 1), ("made_up_kernels:other", 2)])
def test_a_tied_table_is_kept_once_for_each_way_to_pack_it(prepare: str, copies: int) -> None:
    own = Kernel("embedding", "toy.embedding", "made_up_kernels:e", prepare=prepare)
    kernels = [*all_kernels("toy", without=("embedding",)), own]
    registry = register(plugin("toy", kernels, {"toy-1": {}}))
    plan = admit(make_request(model=replace(MODEL, tie_embeddings=True)), registry.hardware["toy-1"], registry)
    assert plan.memory.weights == WEIGHTS - TABLES + copies * TABLES // 2


def test_what_a_reference_kernel_unpacks_is_work() -> None:
    dense = planned(make_request(), 1 << 30, Speed.REFERENCE).memory.work
    assert dense == WORK + 32 * ROPE + 320 * 64 * 4
    coded = planned(make_request(GroupAffineSpec(4, 32, "constant")), 1 << 30, Speed.REFERENCE).memory.work
    assert coded == WORK + 32 * ROPE + 320 * 64 * 24


def test_the_cache_takes_a_quarter_of_what_is_left_but_at_least_one_sequence() -> None:
    assert planned(make_request(), total_for(4 * 100)).num_blocks == 100
    assert planned(make_request(), total_for(4 * 32)).num_blocks == 32
    assert planned(make_request(), total_for(33)).num_blocks == 32
    assert planned(make_request(), total_for(32)).num_blocks == 32


def test_an_open_context_is_shortened_to_what_fits_and_said_so() -> None:
    plan = planned(make_request(), total_for(31))
    assert (plan.max_model_len, plan.num_blocks) == (31 * 16, 31)
    assert "max_model_len is shortened from 512 to 496, what memory holds of one sequence" in plan.choices
    assert plan.memory.usable is not None
    assert plan.memory.total <= plan.memory.usable


def test_an_open_context_is_not_shortened_to_nothing() -> None:
    assert planned(make_request(), total_for(16)).max_model_len == 256
    with pytest.raises(Unfit) as caught:
        planned(make_request(), total_for(15))
    assert [reason.code for reason in caught.value.reasons] == ["FIT-REQ-MEMORY"]


def test_a_context_that_was_asked_for_is_refused_with_the_sum_spelled_out() -> None:
    total = total_for(31)
    with pytest.raises(Unfit) as caught:
        planned(make_request(max_model_len=512), total)
    [reason] = caught.value.reasons
    assert reason.sentence() == ("needs weights 225.2 KiB + 512 tokens of cache 128.0 KiB + work 2.9 MiB = 3.2 MiB; "
                                 "usable memory is 3.2 MiB")
    assert [near.options for near in caught.value.nearest] == [
        "--max-batch-tokens 1024", "--max-num-seqs 32", "--max-model-len 496"]


def test_the_operators_cache_is_the_operators() -> None:
    plan = planned(make_request(kv_memory_bytes=100 * BLOCK + 1), 1 << 30)
    assert plan.num_blocks == 100
    assert not any("cache holds" in sentence for sentence in plan.choices)


def test_an_operators_cache_shortens_an_open_context() -> None:
    plan = planned(make_request(kv_memory_bytes=20 * BLOCK), 1 << 30)
    assert (plan.max_model_len, plan.num_blocks) == (320, 20)


def test_memory_that_nobody_knows_is_not_checked_and_that_is_said() -> None:
    plan = planned(make_request(), None)
    assert plan.memory.usable is None
    assert plan.num_blocks == 64 * 32
    assert "memory was not checked: how much of it this hardware has is not known" in plan.choices


def test_a_device_counts_what_is_free() -> None:
    devices = {"toy:0": {"memory_bytes": 1 << 40, "memory_available_bytes": 1 << 30}, "toy:1": {"memory_bytes": 1 << 20}}
    registry = register(plugin("toy", all_kernels("toy"), devices=devices))
    assert admit(make_request(), registry.devices[0], registry).memory.usable == int(0.9 * (1 << 30))
    with pytest.raises(Unfit):
        admit(make_request(), registry.devices[1], registry)


@pytest.mark.parametrize(("number", "words"), [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1536 << 10, "1.5 MiB"),
                                               (25276059648, "23.5 GiB"), (5 << 40, "5120.0 GiB")])
def test_bytes_in_words(number: int, words: str) -> None:
    assert gib(number) == words
