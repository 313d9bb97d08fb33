"""paged_attention at every level that runs here: against float64, and bit for bit against itself however the work is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

native = pytest.importorskip("fitment_cpu._native", reason="fitment-cpu was installed without its extension")

from fitment_cpu.kernels.paged_attention import paged_attention  # noqa: E402

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FP32: 3e-6, BF16: 2e-2, FP16: 3e-3}
PAIRS = 1e-2
"""Of sums of bf16 products, where the instruction set has them for a bf16 cache: queries and weights are rounded to 8 bits."""
SENTINEL = 123.0


pytestmark = pytest.mark.usefixtures("level")


@pytest.fixture(autouse=True)
def one_thread(level: str) -> None:
    """What is not about threads is computed by one."""
    native.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """A batch. Slots past a sequence's length hold NaN, and table entries past it lie far outside the cache."""

    q: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_lens: tuple[int, ...]

    @property
    def seq_lens(self) -> list[int]:
        return [len(keys) for keys in self.keys]

    def run(self, threads: int = 1) -> torch.Tensor:
        """The op's output; one row of sentinels follows the last query, and must still be there."""
        native.set_num_threads(threads)
        n, heads, size = self.q.shape
        buffer = torch.full((n + 1, heads + 1, size + 3), SENTINEL, dtype=self.q.dtype)
        bounds = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32)
        lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        out = buffer[:n, :heads, :size]
        paged_attention(self.q, self.k_cache, self.v_cache, self.block_table, bounds, lens, size**-0.5, out)
        result = out.clone()
        out.fill_(SENTINEL)
        assert (buffer == SENTINEL).all()
        return result

    def alone(self, sequence: int, row: int) -> torch.Tensor:
        """One query row of one sequence, computed as a decode step of its own."""
        start = sum(self.query_lens[:sequence])
        length = self.seq_lens[sequence] - self.query_lens[sequence] + row + 1
        keys, values = self.keys[sequence][:length], self.values[sequence][:length]
        table = self.block_table[sequence : sequence + 1].contiguous()
        return replace(self, q=self.q[start + row :][:1], keys=(keys,), values=(values,), block_table=table, query_lens=(1,)).run()[0]


def make_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: tuple[int, int] = (9, 3),
    head_size: int = 64,
    block_size: int = 32,
    dtype: torch.dtype = FP32,
    cache_dtype: torch.dtype = FP32,
    seed: int = 0,
) -> Case:
    """Random keys and values, in blocks scattered over the cache."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    counts = [-(-length // block_size) for length in seq_lens]
    shape = (sum(counts) + 2, kv_heads, block_size, head_size)
    k_cache, v_cache = torch.full(shape, math.nan, dtype=cache_dtype), torch.full(shape, math.nan, dtype=cache_dtype)
    table = torch.full((len(seq_lens), max(counts) + 1), 2**30, dtype=torch.int32)
    free = torch.randperm(shape[0], generator=generator).tolist()
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for s, length in enumerate(seq_lens):
        own = [free.pop() for _ in range(counts[s])]
        table[s, : len(own)] = torch.tensor(own, dtype=torch.int32)
        for cache, tokens in ((k_cache, keys), (v_cache, values)):
            new = torch.randn(length, kv_heads, head_size, generator=generator).to(cache_dtype)
            tokens.append(new)
            for i, block in enumerate(own):
                part = new[i * block_size : (i + 1) * block_size]
                cache[block, :, : len(part)] = part.transpose(0, 1)
    q = torch.randn(sum(query_lens), num_heads + 2, head_size + 1, generator=generator).to(dtype)[:, :num_heads, :head_size]
    return Case(q, tuple(keys), tuple(values), k_cache, v_cache, table, tuple(query_lens))


def expected(case: Case) -> torch.Tensor:
    """Attention in float64, a sequence at a time."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    start = 0
    for count, keys, values in zip(case.query_lens, case.keys, case.values, strict=True):
        length, group = len(keys), case.q.shape[1] // keys.shape[1]
        if count and length:
            q = case.q[start : start + count].double()
            k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q, k) * case.q.shape[2] ** -0.5
            seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
            out[start : start + count] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)
        start += count
    return out


def has_pairs(case: Case) -> bool:
    return native.level() == "avx512_bf16" and case.k_cache.dtype == BF16


def assert_right(case: Case, got: torch.Tensor) -> None:
    tolerance = max(TOLERANCE[got.dtype], PAIRS if has_pairs(case) else 0)
    error = (got.double() - expected(case)).abs()
    assert error.max() < tolerance
    assert error.square().mean() < (tolerance / 8) ** 2


QUERY_LENS, SEQ_LENS = (1, 3, 0, 37, 8, 1, 2, 1), (700, 3, 5, 290, 8, 1, 0, 256)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(FP32, FP32), (FP32, BF16), (BF16, BF16), (FP16, FP16)])
@pytest.mark.parametrize(
    ("heads", "head_size", "block_size"),
    [((9, 3), 64, 32), ((4, 4), 80, 16), ((7, 1), 256, 32), ((40, 1), 72, 48), ((4, 2), 13, 16), ((2, 1), 300, 32)],
)
def test_against_float64(
    dtype: torch.dtype, cache_dtype: torch.dtype, heads: tuple[int, int], head_size: int, block_size: int
) -> None:
    case = make_case(QUERY_LENS, SEQ_LENS, heads, head_size, block_size, dtype, cache_dtype)
    got = case.run()
    assert_right(case, got)
    for threads in (2, 7):
        assert torch.equal(case.run(threads), got)
    start = 0
    for s, count in enumerate(QUERY_LENS):
        for row in range(0, count, 6):
            if SEQ_LENS[s]:
                assert torch.equal(case.alone(s, row), got[start + row])
        start += count


def test_every_small_pair_of_lengths() -> None:
    pairs = [(count, length) for length in range(36) for count in range(min(length, 36) + 1)]
    case = make_case([count for count, _ in pairs], [length for _, length in pairs], (2, 1), 8, 16)
    got = case.run()
    assert_right(case, got)
    assert torch.equal(case.run(3), got)


@pytest.mark.parametrize("cache_dtype", [FP32, BF16])
def test_a_prompt_gives_the_same_bits_however_it_is_chunked(cache_dtype: torch.dtype) -> None:
    length = 600
    case = make_case([length], [length], cache_dtype=cache_dtype)
    whole = case.run()
    assert_right(case, whole)
    for chunk in (1, 7, 256, 500):
        for start in range(0, length, chunk if chunk > 1 else 97):
            end = min(start + chunk, length)
            part = replace(
                case, q=case.q[start:end], keys=(case.keys[0][:end],), values=(case.values[0][:end],), query_lens=(end - start,)
            )
            assert torch.equal(part.run(1 + chunk % 3), whole[start:end])


@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
def test_a_long_context_gives_the_same_bits_on_any_number_of_threads(heads: tuple[int, int]) -> None:
    case = make_case([1, 5, 1], [5000, 3001, 100], heads)
    got = case.run()
    assert_right(case, got)
    for threads in (2, 3, 5, 16):
        assert torch.equal(case.run(threads), got)


def test_a_row_depends_on_its_own_keys_alone() -> None:
    case = make_case([40, 1], [300, 70])
    got = case.run()
    poisoned = make_case([40, 1], [300, 70])
    for cache in (poisoned.k_cache, poisoned.v_cache):
        block, slot = int(poisoned.block_table[0, 280 // 32]), 280 % 32
        cache[block, :, slot] = math.nan
    after = poisoned.run()
    assert torch.equal(after[:20], got[:20])  # row j sits at position 260 + j
    assert after[20:40].isnan().all()
    assert torch.equal(after[40], got[40])


def test_the_cache_dtype_changes_no_arithmetic_without_products_of_its_own() -> None:
    case = make_case([1, 20], [333, 20], cache_dtype=BF16)
    widened = replace(case, k_cache=case.k_cache.float(), v_cache=case.v_cache.float())
    if has_pairs(case):
        torch.testing.assert_close(widened.run(), case.run(), rtol=0, atol=PAIRS)
    else:
        assert torch.equal(widened.run(), case.run())


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("cache_dtype", [FP32, BF16])
def test_a_needle_in_a_hundred_thousand_tokens(threads: int, cache_dtype: torch.dtype) -> None:
    """One key of each head matches its queries with a weight of exp(40) against all the others together."""
    length, size, kv_heads = 100_003, 16, 2
    case = make_case([3], [length], (4, kv_heads), size, dtype=FP32, cache_dtype=cache_dtype)
    case.k_cache.mul_(0.01)
    direction = torch.ones(size) * 4
    for position in (0, 31, 32, 255, 256, 54_321, length - 3, length - 2, length - 1):
        block, slot = int(case.block_table[0, position // 32]), position % 32
        saved = case.k_cache[block, :, slot].clone()
        case.k_cache[block, :, slot] = direction.to(cache_dtype) * 4
        found = replace(case, q=direction.expand(3, 4, size)).run(threads)
        case.k_cache[block, :, slot] = saved
        needle = case.v_cache[block, :, slot].float().repeat_interleave(2, 0)
        for row in range(3):
            sees = position <= length - 3 + row
            assert ((found[row] - needle).abs().max() < 1e-5) == sees


def test_an_empty_sequence_gives_zeros_and_no_sequence_nothing() -> None:
    case = make_case([2, 0, 1], [0, 0, 0])
    assert (case.run() == 0).all()
    q, cache, none = torch.zeros(0, 2, 8), torch.zeros(1, 1, 16, 8), torch.zeros(0, dtype=torch.int32)
    paged_attention(q, cache, cache, torch.zeros(0, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), none, 1.0, q)


@pytest.mark.parametrize("block", [-1, 10**9, -(2**31)])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_block_outside_the_cache_is_nan_for_its_sequence_alone(block: int, threads: int) -> None:
    case = make_case([1, 20, 1], [4000, 1000, 90])
    got = case.run()
    case.block_table[0, 77] = block
    broken = case.run(threads)
    assert broken[0].isnan().all()
    assert torch.equal(broken[1:], got[1:])


def test_lengths_beyond_the_table_stay_inside_it() -> None:
    case = make_case([1], [64])
    table = case.block_table[:, :2].contiguous()
    out = torch.zeros(1, 9, 64)
    args = (case.q, case.k_cache, case.v_cache, table, torch.tensor([0, 1], dtype=torch.int32))
    paged_attention(*args, torch.tensor([2**31 - 1], dtype=torch.int32), 0.125, out)
    assert_right(case, out)
    paged_attention(*args, torch.tensor([-5], dtype=torch.int32), 0.125, out)
    assert (out == 0).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.zeros(2, 3, 8)),
        ("q", torch.zeros(2, 16)),
        ("q", torch.zeros(2, 8, 2).transpose(1, 2)),
        ("k_cache", torch.zeros(4, 1, 16, 8, dtype=torch.float64)),
        ("k_cache", torch.zeros(4, 1, 8, 16).transpose(2, 3)),
        ("v_cache", torch.zeros(5, 2, 16, 8)),
        ("block_table", torch.zeros(1, 4, dtype=torch.int64)),
        ("block_table", torch.zeros(4, dtype=torch.int32)),
        ("cu_query_lens", torch.zeros(1, dtype=torch.int32)),
        ("seq_lens", torch.zeros(1)),
        ("out", torch.zeros(2, 2, 8, dtype=torch.bfloat16)),
        ("out", torch.zeros(1, 2, 8)),
    ],
)
def test_what_the_contract_forbids_is_refused(name: str, value: torch.Tensor) -> None:
    int32 = torch.int32
    given = {
        "q": torch.zeros(2, 2, 8), "k_cache": torch.zeros(4, 2, 16, 8), "v_cache": torch.zeros(4, 2, 16, 8),
        "block_table": torch.zeros(1, 4, dtype=int32), "cu_query_lens": torch.tensor([0, 2], dtype=int32),
        "seq_lens": torch.tensor([2], dtype=int32), "out": torch.zeros(2, 2, 8),
    }
    paged_attention(**given, scale=1.0)
    with pytest.raises(ValueError, match=rf"^{name} is torch\.\w+ \[.*wanted"):
        paged_attention(**given | {name: value}, scale=1.0)
