"""Native ``linear`` and ``embedding`` on packed weights, at every instruction set that runs here, against float64 arithmetic."""

from __future__ import annotations

import pytest
import torch

from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine
from fitment.weights.specs import GroupAffineSpec

native = pytest.importorskip("fitment_cpu._native", reason="fitment-cpu was installed without a compiler")

from fitment_cpu.kernels.embedding import embedding  # noqa: E402
from fitment_cpu.kernels.linear import linear_bf16, linear_fp32, linear_int8  # noqa: E402
from fitment_cpu.kernels.weights import PackedWeight, prepare  # noqa: E402

ENTRIES = {"fp32": linear_fp32, "bf16": linear_bf16, "int8": linear_int8}
SENTINEL = 12345.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FP32 = 1e-13
"""Squared error of fp32 sums in a fixed order, relative to the squared size of what is summed."""

AFFINE = 4e-12
"""Of fp32 sums where codes are multiplied first and the offset's share is added to that: what cancels between the two costs bits."""

BF16 = 1e-10
"""Of sums of bf16 products, where codes are multiplied with an offset that is taken off again; x rounded to bf16 has 1e-6."""

INT8 = 1e-9
"""Of int8 products against a quantization made here, where a tie may fall to the other side."""


pytestmark = pytest.mark.usefixtures("level")


def affine(rows: int, cols: int, bits: int, group_size: int, offset: str, scale_dtype: str = "fp16", seed: int = 0) -> GroupAffine:
    """Random codes with parameters such as quantizers give: values of about N(0, 0.02)."""
    random = torch.Generator().manual_seed(seed)
    groups = cols // group_size if group_size else 1
    codes = torch.randint(0, 2**bits, (rows, cols), generator=random, dtype=torch.uint8)
    dtype = DTYPES[scale_dtype]
    scales = (0.04 / 2**bits * (0.5 + torch.rand(rows, groups, generator=random))).to(dtype)
    z: torch.Tensor | int
    if offset == "constant":
        z = 2 ** (bits - 1)
    elif offset == "zero_points":
        z = torch.randint(0, 2**bits, (rows, groups), generator=random).to(dtype)
    else:
        z = (-0.02 - 0.01 * torch.rand(rows, groups, generator=random)).to(dtype)
    return GroupAffine(GroupAffineSpec(bits, group_size, offset, scale_dtype), codes, scales, z)


def activations(n: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Normal values, some columns much greater: as a language model's."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, cols, generator=random)
    x[:, ::37] *= 20
    return x.to(dtype)


def error(got: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> float:
    """Squared error of ``got`` against x times the values, over the squared size of the products' sum without their signs."""
    x, values = x.to(torch.float64), values.to(torch.float64)
    size = (x.abs() @ values.abs().T).square().sum()
    return float((got.to(torch.float64) - x @ values.T).square().sum() / size)


def run(entry: str, x: torch.Tensor, packed: PackedWeight, rows: int, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The product, computed in the middle of a wider buffer, whose other elements must stay."""
    n = x.shape[0]
    wide = torch.full((n + 2, rows + 7), SENTINEL, dtype=out_dtype)
    around = wide[1 : n + 1, 3 : rows + 3]
    ENTRIES[entry](x, packed, around)
    out = around.clone()
    around.fill_(SENTINEL)
    assert (wide == SENTINEL).all(), "written outside of out"
    return out


def quantized(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """x as int8 activations stand for it: steps of 4 rms (or the greatest value, if less) / 127, finer by up to 2^1.5 for groups of small
    values; those with values beyond 4 rms are as fine, with a second byte of 254 such steps."""
    x = x.to(torch.float32)
    groups = x.view(x.shape[0], -1, group_size or x.shape[1])
    bound = torch.minimum(4 * x.square().mean(1).sqrt(), x.abs().amax(1))[:, None, None]
    level = sum(((groups.abs().amax(-1, keepdim=True) <= bound * 2 ** (-i / 2)).double() for i in (1, 2, 3)), torch.zeros(()))
    level = torch.where(groups.abs().amax(-1, keepdim=True) > bound, 3, level)
    step = bound.double() / 127 * 2 ** (-level / 2)
    return (torch.where(step > 0, groups / step, 0).round() * step).view(x.shape)


# ---- against float64 -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 16, 17, 64])
@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (37, 72), (1, 8), (130, 520)])
def test_four_bits_are_right_for_every_number_of_rows(n: int, rows: int, cols: int) -> None:
    weight = affine(rows, cols, 4, 8, "minimums")
    values, packed = weight.dequantize(), prepare(weight)
    x = activations(n, cols)
    assert n == 0 or error(run("fp32", x, packed, rows), x, values) < AFFINE
    assert n == 0 or error(run("bf16", x, packed, rows), x.to(torch.bfloat16), values) < BF16
    assert n == 0 or error(run("int8", x, packed, rows), quantized(x, 8), values) < INT8


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("offset", ["constant", "zero_points", "minimums"])
@pytest.mark.parametrize("group_size", [8, 32, 64, 128, 0])
def test_bits_offsets_and_groups(bits: int, offset: str, group_size: int) -> None:
    rows, cols = 50, 384
    weight = affine(rows, cols, bits, group_size, offset)
    values, packed = weight.dequantize(), prepare(weight)
    for n in (1, 3):
        x = activations(n, cols)
        assert error(run("fp32", x, packed, rows), x, values) < AFFINE
        assert error(run("bf16", x, packed, rows), x.to(torch.bfloat16), values) < BF16
        assert error(run("int8", x, packed, rows), quantized(x, group_size), values) < INT8


@pytest.mark.parametrize("scale_dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", ["zero_points", "minimums"])
def test_parameters_are_kept_exactly(scale_dtype: str, bits: int, offset: str) -> None:
    weight = affine(33, 64, bits, 32, offset, scale_dtype)
    got = prepare(weight).dequantize(torch.float32)
    scale, bias = (part.to(torch.float64).repeat_interleave(32, dim=1) for part in weight.scale_and_bias())
    assert torch.equal(got, (scale * weight.codes + bias).to(torch.float32))
    torch.testing.assert_close(got, weight.dequantize(torch.float32), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("rows", "cols"), [(16, 64), (37, 71), (5, 1), (130, 517)])
@pytest.mark.parametrize("n", [1, 2, 17])
def test_dense(dtype: str, rows: int, cols: int, n: int) -> None:
    values = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)) / 8).to(DTYPES[dtype])
    packed = prepare(Dense(values))
    x = activations(n, cols)
    assert error(run("fp32", x, packed, rows), x, values) < FP32
    assert error(run("bf16", x, packed, rows), x.to(torch.bfloat16), values) < FP32
    assert torch.equal(packed.dequantize(torch.float32), values.to(torch.float32))


def test_dense_of_special_values_is_unpacked_exactly() -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).reshape(256, 256)
    values = halves.nan_to_num(nan=7.0)
    assert torch.equal(prepare(Dense(values)).dequantize(), values.to(torch.float32))


@pytest.mark.parametrize("entry", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("out_dtype", ["same", "fp32"])
def test_types_of_x_and_out(entry: str, dtype: str, out_dtype: str) -> None:
    rows, cols = 40, 96
    weight = affine(rows, cols, 4, 32, "minimums")
    packed = prepare(weight)
    x = activations(6, cols, DTYPES[dtype])
    wanted = run(entry, x.to(torch.float32), packed, rows)
    kind = DTYPES[dtype] if out_dtype == "same" else torch.float32
    assert torch.equal(run(entry, x, packed, rows, kind), wanted.to(kind))


@pytest.mark.parametrize("entry", ["fp32", "bf16", "int8"])
def test_strided_rows(entry: str) -> None:
    rows, cols = 40, 96
    packed = prepare(affine(rows, cols, 4, 32, "minimums"))
    wide = activations(6, cols + 13)
    x = wide[:, 5 : 5 + cols]
    assert torch.equal(run(entry, x, packed, rows), run(entry, x.contiguous(), packed, rows))


def test_a_greater_row_than_the_chunk_of_columns() -> None:
    rows, cols = 20, 9216
    weight = affine(rows, cols, 4, 128, "zero_points")
    packed = prepare(weight)
    x = activations(1, cols)
    assert error(run("fp32", x, packed, rows), x, weight.dequantize()) < AFFINE
    assert error(run("int8", x, packed, rows), quantized(x, 128), weight.dequantize()) < INT8


# ---- a row's result is its own ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("entry", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["affine4", "affine8", "fp32", "bf16", "fp16"])
def test_a_row_gives_the_same_bits_in_any_company(entry: str, kind: str) -> None:
    if entry == "int8" and not kind.startswith("affine"):
        pytest.skip("int8 activations multiply integer codes")
    rows, cols = 131, 1088
    if kind.startswith("affine"):
        packed = prepare(affine(rows, cols, int(kind[-1]), 32, "minimums"))
    else:
        packed = prepare(Dense(torch.randn(rows, cols, generator=torch.Generator().manual_seed(3)).to(DTYPES[kind])))
    x = activations(67, cols)
    threads = native.num_threads()
    try:
        native.set_num_threads(1)
        alone = torch.cat([run(entry, x[i : i + 1], packed, rows) for i in range(x.shape[0])])
        for count in (1, 2, 3):
            native.set_num_threads(count)
            for n in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 67):
                assert torch.equal(run(entry, x[:n], packed, rows), alone[:n]), (count, n)
    finally:
        native.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["affine4", "affine8"])
def test_integer_sums_agree_between_instruction_sets(kind: str, level: str) -> None:
    rows, cols = 33, 256
    packed = prepare(affine(rows, cols, int(kind[-1]), 32, "constant"))
    x = activations(3, cols)
    here = run("int8", x, packed, rows)
    native.set_level(native.levels()[-1])
    torch.testing.assert_close(here, run("int8", x, packed, rows), rtol=1e-5, atol=1e-5, msg=lambda text: f"{level}: {text}")


# ---- what is not a number ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("entry", ["fp32", "bf16", "int8"])
def test_a_nan_reaches_its_row_and_no_other(entry: str) -> None:
    rows, cols = 20, 64
    packed = prepare(affine(rows, cols, 4, 32, "minimums"))
    x = activations(3, cols)
    whole = run(entry, x, packed, rows)
    x[1, 40] = torch.nan
    got = run(entry, x, packed, rows)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize("entry", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-37, 1e-30])
def test_tiny_activations_give_tiny_results(entry: str, size: float) -> None:
    packed = prepare(affine(20, 64, 4, 32, "minimums"))
    got = run(entry, activations(2, 64) * size, packed, 20)
    assert got.isfinite().all()
    assert got.abs().max() <= size * 1000


# ---- embedding ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["affine4", "affine8", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_embedding(kind: str, dtype: str) -> None:
    rows, cols = 37, 72
    if kind.startswith("affine"):
        weight: Dense | GroupAffine = affine(rows, cols, int(kind[-1]), 8, "minimums")
    else:
        weight = Dense(torch.randn(rows, cols, generator=torch.Generator().manual_seed(4)).to(DTYPES[kind]))
    ids = torch.tensor([36, 0, 5, -1, 17, 37, 2**31 - 1, -(2**31)], dtype=torch.int32)
    wide = torch.full((len(ids) + 2, cols + 5), SENTINEL, dtype=DTYPES[dtype])
    out = wide[1:-1, 2 : cols + 2]
    embedding(ids, prepare(weight), out)
    inside = (ids >= 0) & (ids < rows)
    assert torch.equal(out[inside], weight.dequantize(torch.float32).to(DTYPES[dtype])[ids[inside].long()])
    assert out[~inside].isnan().all()
    out.fill_(SENTINEL)
    assert (wide == SENTINEL).all()


# ---- refusals ----------------------------------------------------------------------------------------------------------------

def test_a_group_size_that_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="group size 12"):
        prepare(affine(16, 48, 4, 12, "constant"))


def test_int8_on_a_dense_weight_is_refused() -> None:
    packed = prepare(Dense(torch.ones(4, 8)))
    with pytest.raises(ValueError, match="dense"):
        linear_int8(torch.ones(1, 8), packed, torch.empty(1, 4))


@pytest.mark.parametrize(("x", "out", "offender"), [
    (torch.zeros(2, 31), torch.zeros(2, 16), "x"),
    (torch.zeros(2, 32).double(), torch.zeros(2, 16), "x"),
    (torch.zeros(32, 2).T, torch.zeros(2, 16), "x"),
    (torch.zeros(32), torch.zeros(2, 16), "x"),
    (torch.zeros(2, 32, device="meta"), torch.zeros(2, 16), "x"),
    (torch.zeros(2, 32), torch.zeros(3, 16), "out"),
    (torch.zeros(2, 32), torch.zeros(2, 17), "out"),
    (torch.zeros(2, 32), torch.zeros(2, 16, dtype=torch.int32), "out"),
    (torch.zeros(2, 32), torch.zeros(16, 2).T, "out"),
    (torch.zeros(2, 32), torch.zeros(2, 16, dtype=torch.bfloat16), "out"),
])
@pytest.mark.parametrize("entry", ["fp32", "bf16", "int8"])
def test_wrong_tensors_are_named(x: torch.Tensor, out: torch.Tensor, offender: str, entry: str) -> None:
    packed = prepare(affine(16, 32, 4, 8, "constant"))
    with pytest.raises((ValueError, TypeError), match=rf"^{offender} "):
        ENTRIES[entry](x, packed, out)


@pytest.mark.parametrize("ids", [torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)[::2],
                                 torch.zeros(1, 3, dtype=torch.int32)])
def test_wrong_ids_are_named(ids: torch.Tensor) -> None:
    with pytest.raises((ValueError, TypeError), match="ids"):
        embedding(ids, prepare(Dense(torch.ones(4, 8))), torch.empty(3, 8))
