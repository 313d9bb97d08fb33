"""Checks of what a launch is given, and the module that launches.

A kernel module checks its tensors, then calls ``native.<op>`` with addresses and sizes in the order of the op's struct in
``native/args.h`` (without ``scratch``, which the binding provides): tensors as ``data_ptr()``, strides in elements, element types as
``TYPES[tensor.dtype]``. A launch is queued on nothing: when it returns, it has run. While a graph is being captured it is recorded too.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import fitment_cpu._native as native
from fitment.errors import FitmentError
from fitment_cpu._build import ISA_VARIABLE
from fitment_cpu.detect import usable_cores

__all__ = ["TYPES", "caches_of", "check", "heads_of", "indices", "native", "rows_of"]

THREADS_VARIABLE = "FITMENT_CPU_THREADS"
MAX_THREADS = 1024

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The element types that kernels know, by the numbers of ``fitment::Type``."""


def check(is_right: bool, name: str, tensor: torch.Tensor, wanted: str) -> None:
    """Raise ValueError about the argument ``name`` unless ``is_right``."""
    if not is_right:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}; "
                         f"wanted {wanted}")


def rows_of(name: str, tensor: torch.Tensor, cols: int | None = None, rows: int | None = None) -> int:
    """Check a matrix of a known element type on the CPU whose rows are contiguous; returns its row stride in elements."""
    shape = tensor.shape
    is_right = (len(shape) == 2 and tensor.dtype in TYPES and tensor.device.type == "cpu" and (shape[1] <= 1 or tensor.stride(1) == 1)
                and (cols is None or shape[1] == cols) and (rows is None or shape[0] == rows))
    check(is_right, name, tensor, f"a CPU matrix [{'n' if rows is None else rows}, {'m' if cols is None else cols}] of fp32, bf16 or fp16 "
                                  "with contiguous rows")
    return tensor.stride(0)


def heads_of(name: str, tensor: torch.Tensor, n: int | None = None, head_size: int | None = None) -> None:
    """Check a tensor ``[n, heads, head_size]`` of a known element type on the CPU whose last axis is contiguous."""
    shape = tensor.shape
    is_right = (len(shape) == 3 and tensor.dtype in TYPES and tensor.device.type == "cpu" and (shape[2] <= 1 or tensor.stride(2) == 1)
                and (n is None or shape[0] == n) and (head_size is None or shape[2] == head_size))
    check(is_right, name, tensor, f"a CPU tensor [{'n' if n is None else n}, heads, {'size' if head_size is None else head_size}] of fp32, "
                                  "bf16 or fp16 with a contiguous last axis")


def indices(name: str, tensor: torch.Tensor, count: int) -> None:
    """Check a contiguous int32 vector of ``count`` elements on the CPU."""
    is_right = tensor.dtype == torch.int32 and tensor.shape == (count,) and tensor.device.type == "cpu" and tensor.is_contiguous()
    check(is_right, name, tensor, f"contiguous int32 [{count}] on the CPU")


def caches_of(k_cache: torch.Tensor, v_cache: torch.Tensor, num_kv_heads: int, head_size: int) -> tuple[int, int]:
    """Check a layer's caches ``[block, head, slot, dim]``; returns how many blocks there are and a block's slots."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        shape = cache.shape
        is_right = (len(shape) == 4 and cache.dtype in TYPES and cache.device.type == "cpu" and cache.is_contiguous()
                    and shape[1] == num_kv_heads and shape[3] == head_size and shape == k_cache.shape and cache.dtype == k_cache.dtype
                    and shape[2] % 16 == 0)
        check(is_right, name, cache, f"a contiguous CPU tensor [blocks, {num_kv_heads}, a multiple of 16 slots, {head_size}] of fp32, bf16 "
                                     "or fp16")
    return k_cache.shape[0], k_cache.shape[2]


def _set_up() -> None:
    """Take the operator's variables."""
    level = os.environ.get(ISA_VARIABLE, "")
    if level and not native.set_level(level):
        raise FitmentError(f"{ISA_VARIABLE}={level}: does not run on this processor; these do: {', '.join(native.levels())}")
    threads: Any = os.environ.get(THREADS_VARIABLE, "") or usable_cores()
    if not str(threads).isdigit() or not 1 <= int(threads) <= MAX_THREADS:
        raise FitmentError(f"{THREADS_VARIABLE}={threads}: wanted a whole number from 1 to {MAX_THREADS}")
    native.set_num_threads(int(threads))


_set_up()
