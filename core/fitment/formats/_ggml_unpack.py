"""ggml's blocks as weight families, by whole-tensor operations on the raw bytes.

Blocks of 32 elements, little-endian fp16 scales (ggml-common.h, ggml-quants.c):

    Q4_0  scale, 16 bytes             w = scale * (code - 8)
    Q4_1  scale, minimum, 16 bytes    w = scale * code + minimum
    Q8_0  scale, 32 int8              w = scale * int8, here scale * (code - 128) with code = int8 + 128

Of the 16 bytes, the low nibbles are elements 0-15 of the block and the high nibbles 16-31.

The work is numpy's: torch would start its threads for pieces this small, whose waiting for each other costs more than they do when
the machine is busy.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fitment.dtypes import torch_dtype
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine
from fitment.weights.specs import DenseSpec, WeightSpec

Bytes = NDArray[np.uint8]


def unpack(raw: memoryview, encoding: str, shape: tuple[int, ...], spec: WeightSpec,
           interleaved: tuple[int, int, int] | None = None) -> Dense | GroupAffine:
    """Unpack a tensor of ``shape`` from its bytes; dense values lie on ``raw`` where their rows stay in place.

    Args:
        raw: Writable and as long as the tensor is.
        encoding: F32, F16, BF16, Q4_0, Q4_1 or Q8_0.
        shape: Outermost first.
        spec: The encoding's.
        interleaved: ``(heads, head_size, rotary_size)`` of a tensor whose rows hold rotated pairs side by side; they become halves.

    Raises:
        ValueError: a scale or minimum is not finite.
    """
    data: Bytes = np.frombuffer(raw, np.uint8).reshape(shape[0], -1)
    if interleaved:
        data = data[half_split_order(*interleaved)]
    if isinstance(spec, DenseSpec):
        return Dense(torch.from_numpy(data).view(torch_dtype(spec.dtype)).view(shape))
    blocks = data.reshape(shape[0], shape[1] // spec.group_size, -1)
    scales = _halves(blocks, 0, "scales")
    offset: torch.Tensor | int
    if encoding == "Q8_0":
        codes, offset = np.bitwise_xor(blocks[:, :, 2:], np.uint8(0x80)), 128
    elif encoding == "Q4_0":
        codes, offset = _nibbles(blocks[:, :, 2:]), 8
    else:
        assert encoding == "Q4_1", encoding
        codes, offset = _nibbles(blocks[:, :, 4:]), _halves(blocks, 2, "minimums")
    return GroupAffine(spec, torch.from_numpy(codes.reshape(shape)), scales, offset)


def half_split_order(heads: int, head_size: int, rotary_size: int) -> NDArray[np.intp]:
    """The row that each row of a half-split layout has in an interleaved one: ``[heads * head_size]``.

    In a head, interleaved pairs (2j, 2j + 1) become rows j and j + rotary_size / 2; rows that are not rotated stay.
    """
    head = np.concatenate([np.arange(0, rotary_size, 2), np.arange(1, rotary_size, 2), np.arange(rotary_size, head_size)])
    order: NDArray[np.intp] = np.add.outer(np.arange(heads) * head_size, head).reshape(-1)
    return order


def check_divisors(weight: Dense | GroupAffine) -> None:
    """Raise ValueError unless every value is finite and positive, as what rotary frequencies are divided by must be."""
    values = weight.dequantize()
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise ValueError("a rotary factor is not finite and positive")


def _halves(blocks: Bytes, at: int, what: str) -> torch.Tensor:
    """The fp16 at byte ``at`` of every block: ``[rows, groups]``."""
    values = np.ascontiguousarray(blocks[:, :, at:at + 2]).view(np.float16)[:, :, 0]
    if not np.isfinite(values).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(values))} of {values.size} {what} are not finite")
    return torch.from_numpy(values)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high ones, of each block: ``[rows, groups, 16]`` to ``[rows, groups, 2, 16]``."""
    codes = np.empty((*packed.shape[:2], 2, packed.shape[2]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes
