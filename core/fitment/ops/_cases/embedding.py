"""Cases of ``embedding``: every kind of table, and ids that are in none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fitment.dtypes import torch_dtype
from fitment.facts import Facts
from fitment.hardware import KVLayout
from fitment.ops._cases._case import Arg, Call, Case, Expected, Role, tensor
from fitment.ops._cases._compare import ROUNDING, Close
from fitment.ops._cases._data import Draw, cols_of, spec_name, specs, weight
from fitment.ops._cases.linear import THOROUGH
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine
from fitment.weights.specs import WeightSpec

ROWS = 33
CALLS = ((17, "fp32"), (1, "bf16"), (2, "fp32"), (17, "bf16"))
STRANGE = (-1, ROWS, 2**31 - 1, -(2**31))
"""Ids outside the table."""


def tolerance(facts: Facts) -> float:
    """Greatest NMSE: values are computed in fp32 and rounded."""
    return ROUNDING[str(facts["dtype"])]


def cases(layout: KVLayout) -> Iterator[Case]:
    """Each spec, some of them with every token count and dtype."""
    for i, spec in enumerate(specs()):
        calls = {CALLS[i % len(CALLS)]: None}
        if spec in THOROUGH:
            calls |= {(n, dtype): None for n in (0, 1, 2, 17, 64) for dtype in ("fp32", "bf16", "fp16")}
        for n, dtype in calls:
            yield _case(spec, n, dtype)


def _case(spec: WeightSpec, n: int, dtype: str) -> Case:
    name = f"{spec_name(spec)}/n{n}-{dtype}"
    facts = Facts({"dtype": dtype}) | spec.facts()
    cols = cols_of(spec)

    def build(seed: int) -> Call:
        ids = Draw(name, seed).integers(0, ROWS, n)
        if n >= 17:
            ids[seed + 3 : seed + 3 + len(STRANGE)] = torch.tensor(STRANGE, dtype=torch.int64).to(torch.int32)
        return {"ids": Arg(ids), "weight": weight(spec, ROWS, cols),
                "out": Arg(torch.empty(n, cols, dtype=torch_dtype(dtype)), Role.OUT, is_strided=True)}

    def expect(call: Call) -> Mapping[str, Expected]:
        table = call["weight"]
        assert isinstance(table, Dense | GroupAffine)
        values = table.dequantize(torch.float64)
        absent = torch.full((cols,), torch.nan, dtype=torch.float64)
        rows = [values[i] if 0 <= i < ROWS else absent for i in tensor(call, "ids").tolist()]
        return {"out": Close(torch.stack(rows) if rows else torch.empty(0, cols, dtype=torch.float64), tolerance(facts))}

    return Case(name, facts, build, expect)
