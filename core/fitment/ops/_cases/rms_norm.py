"""Cases of ``rms_norm``: with and without a residual, in place and not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch

from fitment.dtypes import torch_dtype
from fitment.facts import Facts
from fitment.hardware import KVLayout
from fitment.ops._cases._case import Arg, Call, Case, Expected, Role, Same, tensor
from fitment.ops._cases._compare import ROUNDING, Close
from fitment.ops._cases._data import Draw

SHAPES = ((0, 64), (1, 1), (1, 576), (2, 33), (17, 33), (17, 576), (64, 1000), (3, 8192))


def tolerance(facts: Facts) -> float:
    """Greatest NMSE: arithmetic is fp32, and its result is rounded."""
    return ROUNDING[str(facts["dtype"])]


def cases(layout: KVLayout) -> Iterator[Case]:
    """Shapes, dtypes and forms; then values so small that eps counts, and large ones."""
    for (n, hidden), dtype, has_residual, is_in_place in product(SHAPES, ("fp32", "bf16", "fp16"), (False, True), (False, True)):
        yield _case(n, hidden, dtype, has_residual, is_in_place)
    for scale, dtype in product((1e-3, 100.0), ("fp32", "bf16")):
        yield _case(17, 96, dtype, has_residual=True, is_in_place=True, scale=scale)


def _case(n: int, hidden: int, dtype: str, has_residual: bool, is_in_place: bool, scale: float = 1.0) -> Case:
    name = f"n{n}x{hidden}-{dtype}{'-residual' * has_residual}{'-in-place' * is_in_place}{f'-{scale:g}' if scale != 1 else ''}"
    facts = Facts({"dtype": dtype})
    output = "x" if is_in_place else "out"

    def build(seed: int) -> Call:
        draw = Draw(name, seed)
        x = draw.normal(n, hidden, dtype=dtype, scale=scale)
        residual = draw.normal(n, hidden, dtype=dtype, scale=scale)
        return {"x": Arg(x, Role.INOUT if is_in_place else Role.IN, is_strided=True),
                "weight": Arg(Draw(name, 0).uniform(hidden, low=0.5, high=1.5)), "eps": 1e-5,
                "out": Same("x") if is_in_place else Arg(torch.empty_like(x), Role.OUT, is_strided=True),
                "residual": Arg(residual, Role.INOUT, is_strided=True) if has_residual else None}

    def expect(call: Call) -> Mapping[str, Expected]:
        h = tensor(call, "x").to(torch.float64)
        found: dict[str, Expected] = {}
        if has_residual:
            h = (h + tensor(call, "residual")).to(torch_dtype(dtype)).to(torch.float64)
            found["residual"] = Close(h, tolerance(facts))
        normalised = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() * tensor(call, "weight")
        return {**found, output: Close(normalised, tolerance(facts))}

    return Case(name, facts, build, expect)
