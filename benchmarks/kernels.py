"""The CPU's linear kernels against what the machine can do at most: bytes and multiply-adds a second by shape, weight and activations.

    .venv/bin/python benchmarks/kernels.py
"""

from __future__ import annotations

import statistics
import time

import torch
from peers import limits

from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine
from fitment.weights.specs import GroupAffineSpec
from fitment_cpu.kernels.linear import linear_bf16, linear_fp32, linear_int8
from fitment_cpu.kernels.weights import PackedWeight, prepare

SHAPES = ((1536, 576), (4096, 4096), (4096, 14336))
ROWS = (1, 8, 32, 512)
LINEARS = {"int8": linear_int8, "bf16": linear_bf16, "fp32": linear_fp32}
ENOUGH_BYTES = 128 << 20
"""Copies of a weight are used in turn until together they are larger than the caches."""


def affine(rows: int, cols: int, bits: int) -> GroupAffine:
    """Random codes in groups of 32 with fp16 scales and minimums."""
    codes = torch.randint(0, 2**bits, (rows, cols), dtype=torch.uint8)
    scales = torch.rand(rows, cols // 32).half()
    return GroupAffine(GroupAffineSpec(bits, 32, "minimums"), codes, scales, -scales)


def seconds(linear: object, weights: list[PackedWeight], n: int) -> float:
    """Median seconds of one product with n rows."""
    rows, cols = weights[0].shape
    x, out = torch.randn(n, cols), torch.empty(n, rows)
    found = []
    started = time.perf_counter()
    while len(found) < 5 or (time.perf_counter() - started < 0.5 and len(found) < 200):
        weight = weights[len(found) % len(weights)]
        begin = time.perf_counter()
        linear(x, weight, out)  # type: ignore[operator]
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def main() -> None:
    limit = limits(torch.get_num_threads())
    read, peak = limit["read_bytes_per_s"], limit["int8_macs_per_s"]
    print(f"read {read / 1e9:.1f} GB/s, int8 peak {peak / 1e9:.0f} GMAC/s")
    print(f"{'weight':12} {'rows':>6} {'cols':>6} {'n':>4} {'activations':12} {'ms':>9} {'GB/s':>7} {'of read':>8} {'GMAC/s':>7} "
          f"{'of peak':>8}")
    for rows, cols in SHAPES:
        weights = {"4-bit": affine(rows, cols, 4), "8-bit": affine(rows, cols, 8), "bf16": Dense(torch.randn(rows, cols).bfloat16())}
        for name, weight in weights.items():
            packed = [prepare(weight)]
            while len(packed) * packed[0].nbytes < ENOUGH_BYTES:
                packed.append(prepare(weight))
            for n in ROWS:
                for activations, linear in LINEARS.items():
                    if activations == "int8" and not packed[0].is_affine:
                        continue
                    took = seconds(linear, packed, n)
                    rate, macs = packed[0].nbytes / took, rows * cols * n / took
                    print(f"{name:12} {rows:6} {cols:6} {n:4} {activations:12} {1e3 * took:9.3f} {rate / 1e9:7.1f} {rate / read:8.0%} "
                          f"{macs / 1e9:7.0f} {macs / peak:8.0%}")


if __name__ == "__main__":
    main()
