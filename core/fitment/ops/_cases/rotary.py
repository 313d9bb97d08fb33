"""Cases of ``rotary``: whole and partial heads, positions in any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch

from fitment.facts import Facts
from fitment.hardware import KVLayout
from fitment.ops._cases._case import Arg, Call, Case, Expected, Role, tensor
from fitment.ops._cases._compare import ROUNDING, Close
from fitment.ops._cases._data import Draw

HEADS = ((9, 3, 64, 64), (4, 4, 128, 64), (2, 1, 80, 80), (3, 1, 40, 32), (1, 1, 6, 2), (5, 1, 33, 22), (8, 8, 256, 256))
"""Query heads, key-value heads, head size, rotary size."""

MAX_POSITION = 4096


def tolerance(facts: Facts) -> float:
    """Greatest NMSE: arithmetic is fp32, and its result is rounded."""
    return ROUNDING[str(facts["dtype"])]


def cases(layout: KVLayout) -> Iterator[Case]:
    """The first shape of heads with every token count, the others with one."""
    for heads, dtype in product(HEADS, ("fp32", "bf16", "fp16")):
        for n in (0, 1, 2, 17, 64) if heads == HEADS[0] else (17,):
            yield _case(heads, n, dtype)


def _case(heads: tuple[int, int, int, int], n: int, dtype: str) -> Case:
    num_heads, num_kv_heads, size, rot = heads
    name = f"h{num_heads}-{num_kv_heads}-d{size}-r{rot}/n{n}-{dtype}"
    facts = Facts({"dtype": dtype, "head_size": size, "rotary_size": rot})

    def build(seed: int) -> Call:
        draw = Draw(name, seed)
        positions = draw.integers(0, MAX_POSITION, n)
        positions[:2] = torch.tensor((0, MAX_POSITION - 1))[:n]
        return {"q": Arg(draw.normal(n, num_heads, size, dtype=dtype), Role.INOUT, is_strided=True),
                "k": Arg(draw.normal(n, num_kv_heads, size, dtype=dtype), Role.INOUT, is_strided=True),
                "positions": Arg(positions), "cos_sin": Arg(_table(rot))}

    def expect(call: Call) -> Mapping[str, Expected]:
        row = tensor(call, "cos_sin").to(torch.float64)[tensor(call, "positions").long()].unsqueeze(1)
        turn = torch.complex(row[..., : rot // 2], row[..., rot // 2 :])
        kept = torch.arange(size) >= rot
        return {x: Close(_turned(tensor(call, x).to(torch.float64), turn), tolerance(facts), kept) for x in ("q", "k")}

    return Case(name, facts, build, expect)


def _table(rot: int) -> torch.Tensor:
    angles = torch.arange(MAX_POSITION, dtype=torch.float64).outer(10000.0 ** -(torch.arange(0, rot, 2, dtype=torch.float64) / rot))
    return torch.cat((angles.cos(), angles.sin()), -1).to(torch.float32)


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """``x`` with the pairs (i, i + rot / 2) of its heads as complex numbers multiplied by ``turn``."""
    half = turn.shape[-1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)
