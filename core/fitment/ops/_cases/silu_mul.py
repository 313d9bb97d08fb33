"""Cases of ``silu_mul``: odd widths, and gates far out, where an exponential overflows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch

from fitment.dtypes import torch_dtype
from fitment.facts import Facts
from fitment.hardware import KVLayout
from fitment.ops._cases._case import Arg, Call, Case, Expected, Role, tensor
from fitment.ops._cases._compare import ROUNDING, Close
from fitment.ops._cases._data import Draw

SHAPES = ((0, 64), (1, 1), (1, 1536), (2, 33), (17, 33), (64, 96), (3, 5000))
FAR_OUT = (-30000.0, -200.0, -88.7, -0.0, 0.0, 88.8, 200.0, 30000.0)


def tolerance(facts: Facts) -> float:
    """Greatest NMSE: arithmetic is fp32, and its result is rounded."""
    return ROUNDING[str(facts["dtype"])]


def cases(layout: KVLayout) -> Iterator[Case]:
    """Shapes and dtypes."""
    for (n, m), dtype in product(SHAPES, ("fp32", "bf16", "fp16")):
        yield _case(n, m, dtype)
    for dtype in ("fp32", "bf16", "fp16"):
        yield _case(3, len(FAR_OUT) + 5, dtype, FAR_OUT)


def _case(n: int, m: int, dtype: str, gates: tuple[float, ...] = ()) -> Case:
    name = f"n{n}x{m}-{dtype}{'-far-out' if gates else ''}"
    facts = Facts({"dtype": dtype})

    def build(seed: int) -> Call:
        draw = Draw(name, seed)
        x = draw.normal(n, 2 * m, dtype=dtype)
        if gates:
            x[:, : len(gates)], x[:, m : m + len(gates)] = torch.tensor(gates), draw.uniform(n, len(gates), low=-1)
        return {"x": Arg(x, is_strided=True), "out": Arg(torch.empty(n, m, dtype=torch_dtype(dtype)), Role.OUT, is_strided=True)}

    def expect(call: Call) -> Mapping[str, Expected]:
        gate, up = tensor(call, "x").to(torch.float64).chunk(2, dim=-1)
        return {"out": Close(gate / (1 + (-gate).exp()) * up, tolerance(facts))}

    return Case(name, facts, build, expect)
