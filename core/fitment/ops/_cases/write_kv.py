"""Cases of ``write_kv``: slots in no order, some that are none, and a cache whose other slots stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch

from fitment.facts import Facts
from fitment.hardware import KVLayout
from fitment.ops._cases._case import Arg, Call, Case, Expected, Role, tensor
from fitment.ops._cases._compare import ROUNDING, Close
from fitment.ops._cases._data import Draw
from fitment.ops._cases._paged import cache_dtypes, cache_facts, empty_cache

HEADS = ((3, 64, 3), (1, 128, 8), (4, 80, 1), (1, 8, 1), (2, 33, 1), (1, 256, 2))
"""Key-value heads, head size, query heads of each."""

NUM_BLOCKS = 5


def tolerance(facts: Facts) -> float:
    """Greatest NMSE: a narrower cache rounds, an equal or wider one holds just what it was given."""
    dtype, kv_dtype = str(facts["dtype"]), str(facts["kv_dtype"])
    return 0.0 if kv_dtype in (dtype, "fp32") else ROUNDING[kv_dtype]


def cases(layout: KVLayout) -> Iterator[Case]:
    """The first shape of heads with every token count, the others with one."""
    for heads, dtype, kv_dtype in product(HEADS, ("fp32", "bf16", "fp16"), cache_dtypes(layout)):
        for n in (0, 1, 2, 17, 64) if heads == HEADS[0] else (17,):
            yield _case(heads, n, dtype, kv_dtype, layout)


def _case(heads: tuple[int, int, int], n: int, dtype: str, kv_dtype: str, layout: KVLayout) -> Case:
    num_kv_heads, size, group = heads
    name = f"h{num_kv_heads}-d{size}/n{n}-{dtype}-kv-{kv_dtype}"
    facts = cache_facts(dtype, kv_dtype, layout, size, group)
    count = NUM_BLOCKS * layout.block_size
    nowhere = (-1, count, 2**31 - 1, -(2**31))

    def build(seed: int) -> Call:
        draw = Draw(name, seed)
        k, v = (draw.normal(n, num_kv_heads, size, dtype=dtype) for _ in "kv")
        k_cache, v_cache = (empty_cache(NUM_BLOCKS, layout, num_kv_heads, size, kv_dtype) for _ in "kv")
        mapping = draw.shuffled(max(count, n))[:n]
        if n >= 17:
            mapping[seed + 2 : seed + 2 + len(nowhere)] = torch.tensor(nowhere, dtype=torch.int64).to(torch.int32)
        return {"k": Arg(k, is_strided=True), "v": Arg(v, is_strided=True),
                "k_cache": Arg(k_cache, Role.INOUT, order=layout.k_order), "v_cache": Arg(v_cache, Role.INOUT, order=layout.v_order),
                "slot_mapping": Arg(mapping)}

    def expect(call: Call) -> Mapping[str, Expected]:
        return {f"{x}_cache": _written(tensor(call, x), tensor(call, f"{x}_cache"), tensor(call, "slot_mapping"), tolerance(facts))
                for x in "kv"}

    return Case(name, facts, build, expect)


def _written(values: torch.Tensor, cache: torch.Tensor, mapping: torch.Tensor, tolerance: float) -> Close:
    want = torch.zeros(cache.shape, dtype=torch.float64)
    kept = torch.ones(*cache.shape[:2], 1, 1, dtype=torch.bool)
    for i, slot in enumerate(mapping.tolist()):
        if 0 <= slot < cache.shape[0] * cache.shape[1]:
            block, offset = divmod(slot, cache.shape[1])
            want[block, offset] = values[i].to(torch.float64)
            kept[block, offset] = False
    return Close(want, tolerance, kept)
