"""rms_norm, rotary, silu_mul and write_kv at every level that runs here, against float64 and torch's own conversions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

native = pytest.importorskip("fitment_cpu._native", reason="fitment-cpu was installed without its extension")

from fitment_cpu.kernels.rms_norm import rms_norm  # noqa: E402
from fitment_cpu.kernels.rotary import rotary  # noqa: E402
from fitment_cpu.kernels.silu_mul import silu_mul  # noqa: E402
from fitment_cpu.kernels.write_kv import write_kv  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SENTINEL = 123.0
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place of a number in [1, 2)."""


pytestmark = pytest.mark.usefixtures("level")


def wide(n: int, m: int, dtype: torch.dtype, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of sentinels and the matrix ``[n, m]`` inside it, random where a generator is given."""
    buffer = torch.full((n + 2, m + 5), SENTINEL).to(dtype)
    inner = buffer[1:-1, 2:-3]
    if generator is not None:
        inner.copy_(torch.randn(n, m, generator=generator))
    return buffer, inner


def assert_frame_untouched(buffer: torch.Tensor) -> None:
    frame = buffer.clone()
    frame[1:-1, 2:-3] = SENTINEL
    assert (frame == SENTINEL).all()


def assert_near(got: torch.Tensor, want: torch.Tensor, fp32_units: float) -> None:
    """``got`` is ``want`` (float64), computed in fp32 to so many units, then rounded to its type."""
    bound = want.abs() * (UNIT[got.dtype] * (got.dtype != torch.float32) + fp32_units * UNIT[torch.float32]) + 1e-7
    assert (got.double() - want).abs().le(bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 33, 576, 1027])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(dtype: torch.dtype, hidden: int, has_residual: bool) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x_buffer, x = wide(5, hidden, dtype, generator)
    out_buffer, out = wide(5, hidden, dtype)
    residual_buffer, residual = wide(5, hidden, dtype, generator)
    weight = torch.randn(hidden, generator=generator)
    before = x.clone()
    summed = residual + x if has_residual else residual.clone()
    rms_norm(x, weight, 1e-5, out, residual if has_residual else None)
    h = (summed if has_residual else x).double()
    assert_near(out, h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), 8)
    assert torch.equal(residual, summed)
    assert torch.equal(x, before)
    for buffer in (x_buffer, out_buffer, residual_buffer):
        assert_frame_untouched(buffer)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_in_place_and_row_by_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 579, generator=generator).to(dtype)
    residual, weight = torch.randn(64, 579, generator=generator).to(dtype), torch.randn(579, generator=generator)
    native.set_num_threads(1)
    want, want_residual = torch.empty_like(x), residual.clone()
    rms_norm(x, weight, 1e-5, want, want_residual)
    native.set_num_threads(3)
    x2, residual2 = x.clone(), residual.clone()
    rms_norm(x2, weight, 1e-5, x2, residual2)
    assert torch.equal(x2, want)
    assert torch.equal(residual2, want_residual)
    for i in range(0, 64, 7):
        out = torch.empty(1, 579, dtype=dtype)
        rms_norm(x[i : i + 1], weight, 1e-5, out, residual[i : i + 1].clone())
        assert torch.equal(out[0], want[i])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "rot"), [(64, 64), (80, 32), (6, 6), (13, 10), (128, 128)])
def test_rotary_is_a_complex_product(dtype: torch.dtype, head_size: int, rot: int) -> None:
    generator = torch.Generator().manual_seed(rot)
    n, heads, kv_heads, half = 6, 5, 2, rot // 2
    qkv = torch.randn(n, heads + 2 * kv_heads, head_size, generator=generator).to(dtype)
    before = qkv.clone()
    q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    angles = torch.rand(50, half, generator=generator, dtype=torch.float64) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).float()
    positions = torch.tensor([0, 49, 3, 3, 17, 30], dtype=torch.int32)
    rotary(q, k, positions, cos_sin)

    table = torch.complex(cos_sin[:, :half].double(), cos_sin[:, half:].double())[positions.long()][:, None]
    got, old = qkv[:, : heads + kv_heads], before[:, : heads + kv_heads].double()
    turned = torch.complex(old[..., :half], old[..., half:rot]) * table
    magnitude = turned.abs()
    for part, want in ((got[..., :half], turned.real), (got[..., half:rot], turned.imag)):
        assert ((part.double() - want).abs() <= magnitude * (4 * UNIT[torch.float32] + UNIT[dtype] * 1.01)).all()
    assert torch.equal(qkv[..., rot:], before[..., rot:])
    assert torch.equal(qkv[:, heads + kv_heads :], before[:, heads + kv_heads :])


def test_rotary_outside_its_table_is_nan_for_that_token_alone() -> None:
    q, k = torch.ones(4, 2, 8), torch.ones(4, 1, 8)
    rotary(q, k, torch.tensor([0, 10, -1, 9], dtype=torch.int32), torch.ones(10, 8))
    for x in (q, k):
        assert x.isnan().flatten(1).all(1).tolist() == [False, True, True, False]
        assert not x[[0, 3]].isnan().any()


def test_rotary_does_not_depend_on_threads() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(300, 9, 64, generator=generator), torch.randn(300, 3, 64, generator=generator)
    positions, cos_sin = torch.arange(300, dtype=torch.int32), torch.randn(300, 64, generator=generator)
    results = []
    for threads in (1, 4):
        native.set_num_threads(threads)
        q2, k2 = q.clone(), k.clone()
        rotary(q2, k2, positions, cos_sin)
        results.append((q2, k2))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 15, 100, 1024, 1541])
def test_silu_mul(dtype: torch.dtype, m: int) -> None:
    generator = torch.Generator().manual_seed(m)
    x_buffer, x = wide(3, 2 * m, dtype, generator)
    x *= 6
    out_buffer, out = wide(3, m, dtype)
    silu_mul(x, out)
    gate, up = x.double().chunk(2, -1)
    assert_near(out, gate * torch.sigmoid(gate) * up, 8)
    assert_frame_untouched(x_buffer)
    assert_frame_untouched(out_buffer)
    native.set_num_threads(3)
    again = torch.empty(3, m, dtype=dtype)
    silu_mul(x, again)
    assert torch.equal(again, out)


def test_silu_mul_at_the_ends() -> None:
    gate = torch.tensor([0.0, -0.0, 30.0, -30.0, 88.0, -88.0, 1000.0, -1000.0, math.inf, math.nan, 1e-30, -87.5] * 3)
    out = torch.empty(1, len(gate))
    silu_mul(torch.cat((gate, torch.ones(len(gate))))[None], out)
    want = gate.double() * torch.sigmoid(gate.double())
    near = (out[0].double() - want).abs() <= want.abs() * 2e-7 + 1e-37
    assert (near | (out[0].double() == want) | (out[0].isnan() & want.isnan())).all()


def interesting(dtype: torch.dtype) -> torch.Tensor:
    """fp32 numbers that are hard to round to ``dtype``: every value of it, the middles between them, and their neighbours."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = values[values.isfinite()].sort().values
    middle = ((finite[1:].double() + finite[:-1].double()) / 2).float()
    edges = torch.cat((values, middle))
    up, down = (torch.nextafter(edges, torch.tensor(sign * math.inf)) for sign in (1, -1))
    return torch.cat((edges, up, down, torch.tensor([3.4e38, -3.4e38, 1e-45, 65519.9, 65520.0])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_write_kv_rounds_as_torch_does(dtype: torch.dtype) -> None:
    x = interesting(dtype)
    x = torch.cat((x, torch.zeros(-len(x) % 64)))
    kept = x[: len(x) // 64 * 64].view(-1, 1, 64)
    blocks = -(-len(kept) // 16)
    k_cache, v_cache = (torch.zeros(blocks, 1, 16, 64, dtype=dtype) for _ in range(2))
    write_kv(kept, -kept, k_cache, v_cache, torch.arange(len(kept), dtype=torch.int32))
    for cache, source in ((k_cache, kept), (v_cache, -kept)):
        got, want = cache.flatten()[: kept.numel()], source.to(dtype).flatten()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[~got.isnan()].view(torch.int16), want[~want.isnan()].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 64])
def test_write_kv_widens_every_value_exactly(dtype: torch.dtype, width: int) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 1, width)
    k_cache, v_cache = (torch.zeros(2**16 // 16 // width, 1, 16, width) for _ in range(2))
    write_kv(values, values, k_cache, v_cache, torch.arange(len(values), dtype=torch.int32))
    want = values.flatten().float()
    for cache in (k_cache, v_cache):
        got = cache.flatten()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[~got.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_write_kv_writes_its_slots_alone(dtype: torch.dtype, cache_dtype: torch.dtype, threads: int) -> None:
    native.set_num_threads(threads)
    generator = torch.Generator().manual_seed(2)
    n, kv_heads, head_size, blocks, block_size = 90, 3, 21, 4, 32
    kv = torch.randn(n, 2, kv_heads, head_size + 3, generator=generator).to(dtype)
    k, v = kv[:, 0, :, :head_size], kv[:, 1, :, :head_size]
    caches = [torch.full((blocks + 2, kv_heads, block_size, head_size), SENTINEL).to(cache_dtype) for _ in range(2)]
    slots = torch.randperm(blocks * block_size, generator=generator)[:n].to(torch.int32)
    slots[[5, 50, 51, 89]] = torch.tensor([-1, blocks * block_size, 2**31 - 1, -(2**31)], dtype=torch.int32)
    write_kv(k, v, caches[0][1:-1], caches[1][1:-1], slots)
    for cache, source in zip(caches, (k, v), strict=True):
        want = torch.full_like(cache, SENTINEL)
        for i, slot in enumerate(slots.tolist()):
            if 0 <= slot < blocks * block_size:
                want[1 + slot // block_size, :, slot % block_size] = source[i].to(cache_dtype)
        assert torch.equal(cache, want)


def _rms_norm(**changed: torch.Tensor) -> None:
    given = {"x": torch.zeros(2, 8), "weight": torch.zeros(8), "out": torch.zeros(2, 8), "residual": torch.zeros(2, 8)} | changed
    rms_norm(given["x"], given["weight"], 1e-5, given["out"], given["residual"])


def _rotary(**changed: torch.Tensor) -> None:
    heads = {"q": torch.zeros(2, 2, 8), "k": torch.zeros(2, 1, 8)}
    rotary(**heads | {"positions": torch.zeros(2, dtype=torch.int32), "cos_sin": torch.zeros(3, 8)} | changed)


def _silu_mul(**changed: torch.Tensor) -> None:
    silu_mul(**{"x": torch.zeros(2, 16), "out": torch.zeros(2, 8)} | changed)


def _write_kv(**changed: torch.Tensor) -> None:
    caches = {name: torch.zeros(2, 1, 16, 8) for name in ("k_cache", "v_cache")}
    tokens = {name: torch.zeros(2, 1, 8) for name in ("k", "v")}
    write_kv(**tokens | caches | {"slot_mapping": torch.zeros(2, dtype=torch.int32)} | changed)


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (_rms_norm, "x", torch.zeros(8)),
        (_rms_norm, "x", torch.zeros(2, 8, dtype=torch.float64)),
        (_rms_norm, "x", torch.zeros(8, 2).T),
        (_rms_norm, "weight", torch.zeros(8, dtype=torch.bfloat16)),
        (_rms_norm, "weight", torch.zeros(7)),
        (_rms_norm, "out", torch.zeros(2, 8, dtype=torch.bfloat16)),
        (_rms_norm, "residual", torch.zeros(3, 8)),
        (_rms_norm, "residual", torch.zeros(2, 8, device="meta")),
        (_rotary, "q", torch.zeros(2, 16)),
        (_rotary, "k", torch.zeros(3, 1, 8)),
        (_rotary, "k", torch.zeros(2, 1, 8, dtype=torch.bfloat16)),
        (_rotary, "positions", torch.zeros(2, dtype=torch.int64)),
        (_rotary, "cos_sin", torch.zeros(3, 7)),
        (_rotary, "cos_sin", torch.zeros(3, 10)),
        (_silu_mul, "x", torch.zeros(2, 15)),
        (_silu_mul, "out", torch.zeros(2, 8, dtype=torch.float16)),
        (_write_kv, "k", torch.zeros(2, 8)),
        (_write_kv, "v", torch.zeros(2, 1, 8, dtype=torch.bfloat16)),
        (_write_kv, "k_cache", torch.zeros(2, 1, 15, 8)),
        (_write_kv, "k_cache", torch.zeros(2, 16, 8)),
        (_write_kv, "v_cache", torch.zeros(2, 1, 16, 8, dtype=torch.bfloat16)),
        (_write_kv, "slot_mapping", torch.zeros(3, dtype=torch.int32)),
    ],
)
def test_what_a_contract_forbids_is_refused(call: Callable[..., None], name: str, value: torch.Tensor) -> None:
    call()
    with pytest.raises(ValueError, match=rf"^{name} is torch\.\w+ \[.*wanted"):
        call(**{name: value})
