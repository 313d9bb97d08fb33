"""The reference ops against independent float64 arithmetic in numpy, written from the papers' formulas with loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fitment.kernels import GraphSafety, Speed
from fitment.ops import (
    OPS,
    WEIGHTED,
    Need,
    embedding,
    linear,
    op,
    paged_attention,
    reference_kernels,
    rms_norm,
    rotary,
    sample,
    silu_mul,
    write_kv,
)
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine
from fitment.weights.specs import GroupAffineSpec

Array = NDArray[Any]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SENTINEL = 77.0


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` as columns of a wider buffer of sentinels."""
    buffer = torch.full((x.shape[0], *x.shape[1:-1], x.shape[-1] + 3), SENTINEL).to(x.dtype)
    inner = buffer[..., 1:-2]
    inner.copy_(x)
    return inner


def f64(x: torch.Tensor) -> Array:
    return x.to(torch.float64).numpy()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_near(got: torch.Tensor, wanted: Array) -> None:
    tolerance = TOLERANCE[got.dtype]
    np.testing.assert_allclose(f64(got), wanted, rtol=tolerance, atol=tolerance * float(np.abs(wanted).max(initial=1e-30)))


# The table


def test_every_op_is_a_module_with_a_reference_kernel() -> None:
    assert {"linear", "embedding", "rms_norm", "rotary", "silu_mul", "write_kv", "paged_attention", "sample"} <= set(OPS)
    assert set(OPS) >= WEIGHTED
    kernels = reference_kernels("acme")
    assert [kernel.op for kernel in kernels] == list(OPS)
    for kernel in kernels:
        assert kernel.name == f"acme.reference.{kernel.op}"
        assert (kernel.speed, kernel.graph_safe) == (Speed.REFERENCE, GraphSafety.NEVER)
        assert kernel.load() is op(kernel.op).reference
    assert Need("linear") == Need("linear")


# linear, embedding


def dense(dtype: torch.dtype) -> tuple[Dense, Array]:
    values = random(1, 5, 16, dtype=dtype)
    return Dense(values), f64(values)


def affine(offset: str) -> tuple[GroupAffine, Array]:
    """A 3-bit weight of 5 rows in groups of 8, and its values by the definition."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 8, (5, 16), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(5, 2, generator=generator) + 0.5).to(torch.float16)
    z: torch.Tensor | int = 3 if offset == "constant" else random(4, 5, 2, dtype=torch.float16)
    wanted = np.empty((5, 16))
    for row in range(5):
        for col in range(16):
            s, c = float(scales[row, col // 8]), int(codes[row, col])
            zero = float(z[row, col // 8]) if isinstance(z, torch.Tensor) else z
            wanted[row, col] = s * c + zero if offset == "minimums" else s * (c - zero)
    return GroupAffine(GroupAffineSpec(3, 8, offset), codes, scales, z), wanted


WEIGHTS = [*((dense, dtype) for dtype in DTYPES), *((affine, offset) for offset in ("constant", "zero_points", "minimums"))]


@pytest.mark.parametrize(("make", "kind"), WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_linear(make: Any, kind: Any, dtype: torch.dtype, n: int) -> None:
    weight, values = make(kind)
    x, out = wide(random(3, n, 16, dtype=dtype)), wide(torch.zeros(n, 5, dtype=dtype))
    linear.reference(x, weight, out)
    assert_near(out, f64(x) @ values.T)
    exact = torch.empty(n, 5)
    linear.reference(x, weight, exact)  # fp32 whatever the activations are
    assert_near(exact, f64(x) @ values.T)


@pytest.mark.parametrize(("make", "kind"), WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(make: Any, kind: Any, dtype: torch.dtype) -> None:
    weight, values = make(kind)
    out = wide(torch.zeros(6, 16, dtype=dtype))
    embedding.reference(ints(4, 0, -1, 0, 5, 2), weight, out)
    assert_near(out[[0, 1, 3, 5]], values[[4, 0, 0, 2]])
    assert out[[2, 4]].isnan().all()  # outside the table


# rms_norm, rotary, silu_mul


def norm(h: Array, weight: Array, eps: float) -> Array:
    return np.stack([row / math.sqrt(sum(value * value for value in row) / len(row) + eps) * weight for row in h])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
def test_rms_norm(dtype: torch.dtype, scale: float) -> None:
    x, weight = wide(random(5, 4, 24, dtype=dtype, scale=scale)), random(6, 24)
    out = torch.empty(4, 24, dtype=dtype)
    before = x.clone()
    rms_norm.reference(x, weight, 1e-5, out)
    assert_near(out, norm(f64(x), f64(weight), 1e-5))
    assert torch.equal(x, before)
    rms_norm.reference(x, weight, 1e-5, x)  # in place
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_residual_and_normalises_what_is_stored(dtype: torch.dtype) -> None:
    x, residual, weight = random(7, 3, 16, dtype=dtype), random(8, 3, 16, dtype=dtype, scale=50), random(9, 16)
    total = torch.from_numpy(f64(x) + f64(residual)).to(dtype)
    out = torch.empty(3, 16, dtype=dtype)
    rms_norm.reference(x, weight, 1e-6, out, residual)
    assert torch.equal(residual, total)
    assert_near(out, norm(f64(total), f64(weight), 1e-6))


def test_rms_norm_of_nothing_is_nothing() -> None:
    out = torch.empty(2, 8)
    rms_norm.reference(torch.zeros(2, 8), torch.ones(8), 1e-5, out)
    assert torch.equal(out, torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head", "rot"), [(8, 8), (16, 8), (6, 2), (4, 0)])
def test_rotary_is_a_multiplication_of_complex_numbers(dtype: torch.dtype, head: int, rot: int) -> None:
    """Su et al.: the pair (x1, x2) as x1 + i x2 times exp(i m theta_j)."""
    positions = ints(0, 1, 13, 99, 99)
    theta = 10000.0 ** (-2 * np.arange(rot // 2) / max(rot, 1))
    angles = np.outer(np.arange(100), theta)
    cos_sin = torch.from_numpy(np.concatenate((np.cos(angles), np.sin(angles)), axis=1)).float()
    q, k = random(10, 5, 4, head, dtype=dtype), random(11, 5, 2, head, dtype=dtype)
    wanted = []
    for x in (q, k):
        values = f64(x).copy()
        turned = (values[..., : rot // 2] + 1j * values[..., rot // 2 : rot]) * np.exp(1j * angles[positions])[:, None]
        values[..., : rot // 2], values[..., rot // 2 : rot] = turned.real, turned.imag
        wanted.append(values)
    untouched = q[..., rot:].clone()
    rotary.reference(q, k, positions, cos_sin)
    assert_near(q, wanted[0])
    assert_near(k, wanted[1])
    assert torch.equal(q[..., rot:], untouched)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    x = wide(torch.cat((random(12, 4, 10, dtype=dtype, scale=4), random(13, 4, 10, dtype=dtype)), dim=1))
    x[0, :3] = torch.tensor([-80.0, 0.0, 80.0], dtype=dtype)
    out = torch.empty(4, 10, dtype=dtype)
    silu_mul.reference(x, out)
    gate, up = f64(x)[:, :10], f64(x)[:, 10:]
    assert_near(out, gate / (1 + np.exp(-gate)) * up)


# write_kv, paged_attention


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_write_kv(cache_dtype: torch.dtype) -> None:
    k, v = random(14, 5, 2, 4), random(15, 5, 2, 4)
    k_cache, v_cache = (torch.full((3, 16, 2, 4), SENTINEL, dtype=cache_dtype) for _ in range(2))
    write_kv.reference(k, v, k_cache, v_cache, ints(17, -1, 47, 48, 0))
    for values, cache in ((k, k_cache), (v, v_cache)):
        for token, slot in {0: 17, 2: 47, 4: 0}.items():
            assert torch.equal(cache[slot // 16, slot % 16], values[token].to(cache_dtype))
        assert int((cache == SENTINEL).sum()) == (48 - 3) * 2 * 4


def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
    """One sequence: queries ``[ql, heads, d]`` are the last positions of keys ``[length, kv_heads, d]``."""
    count, heads, size = q.shape
    length, group = len(k), heads // k.shape[1]
    out = np.zeros((count, heads, size))
    for j in range(count):
        seen = length - count + j + 1
        for h in range(heads):
            scores = [scale * sum(q[j, h, d] * k[t, h // group, d] for d in range(size)) for t in range(seen)]
            weights = [math.exp(score - max(scores)) for score in scores]
            for t in range(seen):
                out[j, h] += weights[t] / sum(weights) * v[t, h // group]
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("lengths", "queries"), [
    ((1,), (1,)),
    ((9,), (9,)),  # prefill
    ((9, 4, 16), (1, 1, 1)),  # decode, a full block among them
    ((9, 5, 7), (3, 5, 1)),  # a chunk, a prefill, a decode
    ((6, 0, 5), (2, 0, 1)),  # an empty sequence between
    ((4, 8), (0, 2)),  # cached, but asked for nothing
])
def test_paged_attention(heads: int, kv_heads: int, lengths: tuple[int, ...], queries: tuple[int, ...]) -> None:
    size, slots, scale = 4, 4, 0.7
    rng = np.random.default_rng(sum(lengths) + heads)
    order = rng.permutation(20)
    k_cache, v_cache = (torch.full((20, slots, kv_heads, size), torch.nan) for _ in range(2))  # what is not written is never read
    block_table = torch.full((len(lengths), 5), 10**6, dtype=torch.int32)
    keys, used = [], 0
    for s, length in enumerate(lengths):
        k, v = rng.standard_normal((2, length, kv_heads, size)).astype(np.float32)
        blocks = order[used : used + -(-length // slots)]
        used += len(blocks)
        block_table[s, : len(blocks)] = torch.from_numpy(blocks)
        for t in range(length):
            k_cache[blocks[t // slots], t % slots] = torch.from_numpy(k[t])
            v_cache[blocks[t // slots], t % slots] = torch.from_numpy(v[t])
        keys.append((k.astype(np.float64), v.astype(np.float64)))
    total = sum(queries)
    q = rng.standard_normal((total + 2, heads, size)).astype(np.float32)  # padding behind the last query
    out = torch.full((total + 2, heads, size), SENTINEL)
    bounds = np.concatenate(([0], np.cumsum(queries)))
    paged_attention.reference(torch.from_numpy(q), k_cache, v_cache, block_table, ints(*bounds), ints(*lengths), scale, out)
    for s, (k, v) in enumerate(keys):
        rows = slice(bounds[s], bounds[s + 1])
        assert_near(out[rows], attend(q[rows].astype(np.float64), k, v, scale))
    assert (out[total:] == SENTINEL).all()


def test_paged_attention_of_an_empty_sequence_is_zero() -> None:
    cache, out = torch.full((2, 4, 1, 4), torch.nan), torch.full((3, 2, 4), SENTINEL)
    paged_attention.reference(random(16, 3, 2, 4), cache, cache, torch.zeros(2, 1, dtype=torch.int32), ints(0, 2, 2), ints(0, 0), 1.0, out)
    assert (out[:2] == 0).all()
    assert (out[2] == SENTINEL).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_paged_attention_takes_every_pair_of_types(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    q, cache = random(17, 2, 4, 8, dtype=dtype), random(18, 2, 16, 2, 8, dtype=cache_dtype)
    out = torch.empty(2, 4, 8, dtype=dtype)
    paged_attention.reference(q, cache, cache.flip(1), ints(1, 0).view(1, 2), ints(0, 2), ints(19), 0.3, out)
    k, v = (f64(values)[[1, 0]].reshape(32, 2, 8)[:19] for values in (cache, cache.flip(1)))
    assert_near(out, attend(f64(q), k, v, 0.3))


def test_large_scores_do_not_overflow() -> None:
    q, cache = torch.full((1, 1, 4), 300.0), torch.zeros(1, 4, 1, 4)
    cache[0, 2] = 300.0
    out = torch.empty(1, 1, 4)
    paged_attention.reference(q, cache, cache, ints(0).view(1, 1), ints(0, 1), ints(4), 1.0, out)
    assert torch.equal(out, torch.full((1, 1, 4), 300.0))


# sample


def draw(logits: Any, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, uniform: float = 0.0) -> int:
    """One row's token."""
    out = ints(-7)
    rows = torch.tensor([logits], dtype=torch.float32)
    before = rows.clone()
    sample.reference(rows, torch.tensor([temperature]), ints(top_k), torch.tensor([top_p]), torch.tensor([min_p]),
                     torch.tensor([uniform]), out)
    assert torch.equal(rows, before) or math.isnan(sum(logits))
    return int(out)


def kept(logits: Any, **filters: Any) -> set[int]:
    """The tokens that a fine sweep of the uniform number finds."""
    return {draw(logits, uniform=float(u), **filters) for u in np.linspace(0, 1, 400, endpoint=False)}


LOGITS = np.log([0.05, 0.4, 0.2, 0.05, 0.3]).tolist()


@pytest.mark.parametrize(("uniform", "token"), [
    (0.0, 0), (0.049, 0), (0.051, 1), (0.449, 1), (0.451, 2), (0.649, 2), (0.651, 3), (0.699, 3), (0.701, 4), (0.999999, 4),
])
def test_the_first_token_whose_running_sum_exceeds_the_number(uniform: float, token: int) -> None:
    assert draw(LOGITS, uniform=uniform) == token


@pytest.mark.parametrize(("filters", "tokens"), [
    ({}, {0, 1, 2, 3, 4}),
    ({"top_k": 1}, {1}),
    ({"top_k": 3}, {1, 2, 4}),
    ({"top_k": 4}, {0, 1, 2, 4}),  # of two equal ones the lower index
    ({"top_k": 50}, {0, 1, 2, 3, 4}),
    ({"top_p": 0.39}, {1}),
    ({"top_p": 0.41}, {1, 4}),
    ({"top_p": 0.69}, {1, 4}),
    ({"top_p": 0.91}, {0, 1, 2, 4}),
    ({"top_p": 1e-6}, {1}),
    ({"min_p": 0.51}, {1, 4}),
    ({"min_p": 0.49}, {1, 2, 4}),
    ({"min_p": 1.0}, {1}),
    ({"top_k": 2, "top_p": 0.57}, {1}),  # of two, renormalised to 4/7 and 3/7
    ({"top_k": 2, "top_p": 0.58}, {1, 4}),
    ({"top_p": 0.8, "min_p": 0.6}, {1, 4}),
    ({"temperature": 0.5, "min_p": 0.51}, {1, 4}),  # the ratio is squared: 9/16
    ({"temperature": 0.5, "min_p": 0.57}, {1}),
])
def test_filters_keep(filters: dict[str, Any], tokens: set[int]) -> None:
    assert kept(LOGITS, **filters) == tokens


@pytest.mark.parametrize(("filters", "count"), [({"top_p": 0.5}, 2), ({"top_p": 0.75}, 3), ({"top_k": 3}, 3), ({"min_p": 1.0}, 4)])
def test_of_equal_ones_the_lowest_are_kept(filters: dict[str, Any], count: int) -> None:
    assert kept([1.5] * 4, **filters) == set(range(count))  # a prefix that reaches top_p exactly is long enough


def test_greedy_takes_the_lowest_of_the_greatest() -> None:
    assert draw([1.0, 3.0, 2.0, 3.0], temperature=0.0, uniform=0.99) == 1
    assert draw([-math.inf, -5.0, -math.inf], temperature=0.0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[0.0, math.nan], [-math.inf, -math.inf], [0.0, math.inf], [math.nan, math.nan]])
def test_a_row_that_cannot_be_sampled(logits: list[float], temperature: float) -> None:
    assert draw(logits, temperature=temperature) == -1


def test_what_is_ruled_out_is_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    assert kept(logits) == {1, 3}
    assert draw(logits, uniform=float(np.nextafter(np.float32(1), np.float32(0)))) == 3


def test_rows_are_apart() -> None:
    out = ints(0, 0, 0, 0)
    logits = torch.tensor([LOGITS, LOGITS, [math.nan] * 5, LOGITS])
    sample.reference(logits, torch.tensor([0.0, 1.0, 1.0, 1.0]), ints(0, 0, 0, 1), torch.ones(4), torch.zeros(4),
                     torch.tensor([0.9, 0.9, 0.9, 0.1]), out)
    assert out.tolist() == [1, 4, -1, 1]
    sample.reference(torch.empty(0, 5), torch.empty(0), ints(), torch.empty(0), torch.empty(0), torch.empty(0), ints())


def probabilities(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """The contract, by sorting pairs: temperature, top-k, top-p of what is left, min-p of what is left, renormalised."""
    weights = np.exp((logits - logits.max()) / temperature)
    ranked = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if top_k:
        ranked = ranked[:top_k]
    total, running, prefix = math.fsum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        prefix.append(i)
        running += weights[i] / total
        if top_p < 1 and running >= top_p:
            break
    chosen = [i for i in prefix if weights[i] >= min_p * weights[prefix[0]]]
    result = np.zeros(len(logits))
    result[chosen] = weights[chosen] / math.fsum(weights[chosen])
    return result


@given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 2.5]), st.integers(0, 12), st.floats(0.05, 1.0), st.floats(0.0, 0.9))
@settings(max_examples=30, deadline=None)
def test_sampling_follows_the_distribution(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Over an even sweep of the number, each token comes as often as its probability says, to within one step at each end."""
    logits = np.random.default_rng(seed).normal(size=10).astype(np.float32)
    parameters = [float(np.float32(value)) for value in (temperature, top_p, min_p)]
    wanted = probabilities(logits.astype(np.float64), parameters[0], top_k, parameters[1], parameters[2])
    steps = 256
    out = torch.empty(steps, dtype=torch.int32)
    uniform = (torch.arange(steps) + 0.5) / steps
    columns = [torch.full((steps,), value) for value in parameters]
    sample.reference(torch.from_numpy(logits).expand(steps, -1), columns[0], torch.full((steps,), top_k, dtype=torch.int32), columns[1],
                     columns[2], uniform, out)
    counts = np.bincount(out.numpy(), minlength=10)
    assert (np.abs(counts - steps * wanted) <= 1).all()
    assert (out.diff() >= 0).all()  # in vocabulary order
