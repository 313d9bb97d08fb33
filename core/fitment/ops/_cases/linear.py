"""Cases of ``linear``: every kind of weight under every view of the activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fitment.dtypes import torch_dtype
from fitment.facts import Facts
from fitment.hardware import KVLayout
from fitment.ops._cases._case import Arg, Call, Case, Expected, Role, tensor
from fitment.ops._cases._compare import ROUNDING, Close
from fitment.ops._cases._data import Draw, cols_of, spec_name, specs, weight
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine
from fitment.weights.specs import DenseSpec, GroupAffineSpec, WeightSpec

ACTIVATIONS = ("fp32", "bf16", "int8")
ROWS = (33, 48, 19, 130)
CALLS = ((17, "fp32"), (1, "bf16"), (2, "fp32"), (64, "bf16"), (1, "fp32"), (5, "bf16"))
"""Token counts and dtypes that the kinds of weight take in turn."""

THOROUGH = (
    DenseSpec("fp32"), DenseSpec("bf16"), DenseSpec("fp16"), GroupAffineSpec(4, 32, "minimums", "fp16"),
    GroupAffineSpec(4, 32, "constant", "fp16"), GroupAffineSpec(4, 128, "zero_points", "bf16"), GroupAffineSpec(8, 0, "constant", "fp32"),
)
"""Kinds that are tried with every token count and dtype."""

PRODUCTS = {"fp32": 1e-11, "bf16": 1.5e-5, "int8": 8e-5}
"""NMSE of the products: for bf16, activations and weights are rounded once; for int8, activations have a scale for a row or less."""


def tolerance(facts: Facts, n: int, out: str) -> float:
    """Greatest NMSE of a call of ``n`` tokens whose output has the dtype ``out``.

    Errors of int8 activations go into all outputs of a token alike, so that of few tokens the mean may be less lucky.
    """
    activations = str(facts["activations"])
    return PRODUCTS[activations] * (1 + 3 / max(n, 1) if activations == "int8" else 1) + ROUNDING[out]


def cases(layout: KVLayout) -> Iterator[Case]:
    """Each spec with each view of the activations; then shapes."""
    for i, spec in enumerate(specs()):
        rows, cols = ROWS[i % len(ROWS)], cols_of(spec)
        calls = {(*CALLS[(i + j) % len(CALLS)], activations): None for j, activations in enumerate(ACTIVATIONS)}
        if spec in THOROUGH:
            calls |= {(n, dtype, activations): None for n in (0, 1, 2, 17, 64) for dtype in ("fp32", "bf16", "fp16")
                      for activations in ACTIVATIONS}
        for n, dtype, activations in calls:
            yield _case(spec, rows, cols, n, dtype, activations)
        if spec in THOROUGH:
            for activations in ACTIVATIONS:
                yield _case(spec, 200, 1024, 130, "fp32", activations, suffix="-200x1024")
                yield _case(spec, 1000, 2048, 1, "fp32", activations, suffix="-1000x2048")
                yield _case(spec, rows, cols, 17, "bf16", activations, out="fp32", suffix="-to-fp32")
    for activations in ACTIVATIONS:
        yield _case(GroupAffineSpec(8, 0, "constant", "fp32"), 33, 77, 17, "fp32", activations, suffix="-33x77")
        yield _case(DenseSpec("fp32"), 1, 1, 1, "fp32", activations, suffix="-1x1")
        yield _case(GroupAffineSpec(4, 20, "minimums", "fp16"), 33, 60, 17, "fp32", activations)


def _case(spec: WeightSpec, rows: int, cols: int, n: int, dtype: str, activations: str, out: str = "", suffix: str = "") -> Case:
    name = f"{spec_name(spec)}/n{n}-{dtype}{'' if activations == dtype else '-' + activations}{suffix}"
    facts = Facts({"dtype": dtype, "activations": activations}) | spec.facts()
    out = out or dtype

    def build(seed: int) -> Call:
        return {"x": Arg(Draw(name, seed).normal(n, cols, dtype=dtype), is_strided=True), "weight": weight(spec, rows, cols),
                "out": Arg(torch.empty(n, rows, dtype=torch_dtype(out)), Role.OUT, is_strided=True)}

    def expect(call: Call) -> Mapping[str, Expected]:
        packed = call["weight"]
        assert isinstance(packed, Dense | GroupAffine)
        x, values = tensor(call, "x").to(torch.float64), packed.dequantize(torch.float64)
        magnitude = (x.square() @ values.square().T).sqrt()
        return {"out": Close(x @ values.T, tolerance(facts, n, out), magnitude=magnitude)}

    return Case(name, facts, build, expect)
