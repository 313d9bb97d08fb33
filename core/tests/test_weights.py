"""The weight families against arithmetic by hand in float64, and what their constructors refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fitment.facts import Facts
from fitment.weights import DenseSpec, GroupAffineSpec
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine

# Two rows, two groups of two columns.
CODES = [[0, 3, 1, 2], [15, 7, 8, 9]]
SCALES = [[0.5, -2.0], [0.25, 1.0]]
OFFSETS: dict[str, Any] = {"constant": 8, "zero_points": [[1.0, 2.0], [3.0, 7.5]], "minimums": [[0.125, 10.0], [-1.0, 0.0]]}
VALUES = {
    "constant": [[-4.0, -2.5, 14.0, 12.0], [1.75, -0.25, 0.0, 1.0]],
    "zero_points": [[-0.5, 1.0, 2.0, 0.0], [3.0, 1.0, 0.5, 1.5]],
    "minimums": [[0.125, 1.625, 8.0, 6.0], [2.75, 0.75, 8.0, 9.0]],
}


def weight(offset: str, scale_dtype: str = "fp16") -> GroupAffine:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[scale_dtype]
    value = OFFSETS[offset]
    codes, scales = torch.tensor(CODES, dtype=torch.uint8), torch.tensor(SCALES, dtype=dtype)
    return GroupAffine(GroupAffineSpec(4, 2, offset, scale_dtype), codes, scales,
                       value if isinstance(value, int) else torch.tensor(value, dtype=dtype))


@pytest.mark.parametrize("scale_dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_dequantized_by_hand(offset: str, scale_dtype: str) -> None:
    values = weight(offset, scale_dtype).dequantize()
    assert values.dtype == torch.float64
    assert values.tolist() == VALUES[offset]
    assert weight(offset, scale_dtype).dequantize(torch.float32).tolist() == VALUES[offset]


@pytest.mark.parametrize("offset", OFFSETS)
def test_scale_and_bias_give_the_same_values(offset: str) -> None:
    scale, bias = weight(offset).scale_and_bias()
    assert scale.dtype == bias.dtype == torch.float32
    found = np.repeat(scale.numpy(), 2, axis=1) * np.array(CODES, np.float64) + np.repeat(bias.numpy(), 2, axis=1)
    assert found.tolist() == VALUES[offset]


@pytest.mark.parametrize("offset", OFFSETS)
def test_rows_are_taken_in_the_order_asked_for(offset: str) -> None:
    rows = weight(offset).rows(torch.tensor([1, 0, 1]))
    assert rows.shape == (3, 4)
    assert rows.dequantize().tolist() == [VALUES[offset][i] for i in (1, 0, 1)]


@pytest.mark.parametrize("offset", OFFSETS)
def test_cat_puts_one_below_the_other(offset: str) -> None:
    both = GroupAffine.cat([weight(offset), weight(offset).rows(torch.tensor([1]))])
    assert both.spec == weight(offset).spec
    assert both.dequantize().tolist() == [*VALUES[offset], VALUES[offset][1]]


def test_cat_refuses_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"cat: specs differ: GroupAffine 4-bit, groups of 2, constant, GroupAffine 4-bit, .* minimums"):
        GroupAffine.cat([weight("constant"), weight("minimums")])
    other = GroupAffine(weight("constant").spec, weight("constant").codes, weight("constant").scales, 7)
    with pytest.raises(ValueError, match=r"constant offsets differ: \[8, 7\]"):
        GroupAffine.cat([weight("constant"), other])


def test_a_group_may_be_the_whole_row() -> None:
    spec = GroupAffineSpec(8, 0, "constant", "fp32")
    whole = GroupAffine(spec, torch.tensor([[1, 255, 128]], dtype=torch.uint8), torch.tensor([[0.5]]), 128)
    assert whole.dequantize().tolist() == [[-63.5, 63.5, 0.0]]
    assert str(spec) == "GroupAffine 8-bit, groups of a row, constant"


@pytest.mark.parametrize(("changed", "wanted"), [
    ({"codes": torch.tensor(CODES, dtype=torch.int8)}, r"codes are torch\.int8, wanted uint8"),
    ({"codes": torch.zeros(2, 5, dtype=torch.uint8)}, "5 columns are not a multiple of the group size 2"),
    ({"scales": torch.zeros(2, 4)}, r"scales have shape \(2, 4\), wanted \(2, 2\)"),
    ({"offset": torch.zeros(2, 2)}, "offset is Tensor, which does not go with 'constant'"),
    ({"spec": GroupAffineSpec(4, 2, "minimums")}, "offset is int, which does not go with 'minimums'"),
    ({"spec": GroupAffineSpec(4, 2, "zero_points"), "offset": torch.zeros(2, 1)}, r"offset has shape \(2, 1\), wanted \(2, 2\)"),
])
def test_parts_that_do_not_fit_are_refused(changed: dict[str, Any], wanted: str) -> None:
    good = weight("constant")
    parts = {"spec": good.spec, "codes": good.codes, "scales": good.scales, "offset": good.offset}
    with pytest.raises(ValueError, match=wanted):
        GroupAffine(**{**parts, **changed})


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([2, 8, 32]), st.integers(2, 8), st.sampled_from(sorted(OFFSETS)), st.data())
def test_any_codes_against_float64(rows: int, groups: int, size: int, bits: int, offset: str, data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    codes = random.integers(0, 1 << bits, (rows, groups * size), dtype=np.uint8)
    scales, other = (random.standard_normal((rows, groups)).astype(np.float16) for _ in range(2))
    zero = int(random.integers(0, 1 << bits))
    group_affine = GroupAffine(GroupAffineSpec(bits, size, offset), torch.from_numpy(codes), torch.from_numpy(scales),
                               zero if offset == "constant" else torch.from_numpy(other))
    for row, col in ((0, 0), (rows - 1, groups * size - 1), (rows // 2, groups * size // 2)):
        scale, own, code = float(scales[row, col // size]), float(other[row, col // size]), float(codes[row, col])
        wanted = {"constant": scale * (code - zero), "zero_points": scale * (code - own), "minimums": scale * code + own}[offset]
        assert group_affine.dequantize()[row, col].item() == wanted
        scale_32, bias_32 = (part[row, col // size].item() for part in group_affine.scale_and_bias())
        assert scale_32 * code + bias_32 == pytest.approx(wanted, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense(dtype: torch.dtype) -> None:
    values = [[0.5, -1.5], [3.0, 0.0], [-0.25, 8.0]]
    dense = Dense(torch.tensor(values, dtype=dtype))
    assert (dense.shape, dense.dequantize().dtype, dense.dequantize().tolist()) == ((3, 2), torch.float64, values)
    assert dense.rows(torch.tensor([2, 2, 0])).dequantize().tolist() == [values[2], values[2], values[0]]
    both = Dense.cat([dense, dense.rows(torch.tensor([1]))])
    assert (both.spec, both.dequantize().tolist()) == (dense.spec, [*values, values[1]])
    assert torch.tensor([], dtype=dtype).element_size() * 6 == dense.spec.nbytes(3, 2)


def test_a_dense_weight_of_another_type_has_no_spec() -> None:
    with pytest.raises(ValueError, match=r"dtype 'float64' is none of fp32, fp16, bf16"):
        _ = Dense(torch.zeros(1, 1, dtype=torch.float64)).spec


@pytest.mark.parametrize(("spec", "rows", "cols", "nbytes"), [
    (DenseSpec("fp32"), 3, 5, 60),
    (DenseSpec("bf16"), 3, 5, 30),
    (GroupAffineSpec(4, 32, "constant"), 2, 64, 2 * 2 * 18),  # ggml's Q4_0: 18 bytes a block of 32
    (GroupAffineSpec(4, 32, "minimums"), 2, 64, 2 * 2 * 20),  # Q4_1
    (GroupAffineSpec(8, 32, "constant"), 2, 64, 2 * 2 * 34),  # Q8_0
    (GroupAffineSpec(4, 128, "zero_points", "bf16"), 3, 256, 3 * (128 + 2 * 4)),
    (GroupAffineSpec(8, 0, "constant", "fp32"), 3, 7, 3 * (7 + 4)),
    (GroupAffineSpec(3, 0, "constant", "fp16"), 1, 3, 2 + 2),  # nine bits take two bytes
])
def test_bytes_of_a_packed_weight(spec: DenseSpec | GroupAffineSpec, rows: int, cols: int, nbytes: int) -> None:
    assert spec.nbytes(rows, cols) == nbytes


@pytest.mark.parametrize(("make", "wanted"), [
    (lambda: DenseSpec("int8"), "DenseSpec: dtype 'int8' is none of fp32, fp16, bf16"),
    (lambda: GroupAffineSpec(1, 32, "constant"), r"bits 1 is not in 2\.\.8"),
    (lambda: GroupAffineSpec(9, 32, "constant"), r"bits 9 is not in 2\.\.8"),
    (lambda: GroupAffineSpec(4, -1, "constant"), "group_size -1 is negative"),
    (lambda: GroupAffineSpec(4, 32, "zeros"), "offset 'zeros' is none of constant, zero_points, minimums"),
    (lambda: GroupAffineSpec(4, 32, "constant", "int8"), "scale_dtype 'int8' is none of"),
])
def test_specs_that_cannot_be(make: Any, wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        make()


def test_the_facts_that_conditions_see() -> None:
    assert DenseSpec("bf16").facts() == Facts({"weight.family": "dense", "weight.dtype": "bf16", "weight.bits": 16})
    assert GroupAffineSpec(4, 32, "minimums").facts() == Facts({
        "weight.family": "group_affine", "weight.bits": 4, "weight.group_size": 32, "weight.offset": "minimums",
        "weight.scale_dtype": "fp16"})
