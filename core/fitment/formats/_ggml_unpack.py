"""ggml's blocks as weight families, by whole-tensor operations on the raw bytes.

Blocks of 32 elements, little-endian fp16 scales (ggml-common.h, ggml-quants.c):

    Q4_0  scale, 16 bytes             w = scale * (code - 8)
    Q4_1  scale, minimum, 16 bytes    w = scale * code + minimum
    Q8_0  scale, 32 int8              w = scale * int8, here scale * (code - 128) with code = int8 + 128

Of the 16 bytes, the low nibbles are elements 0-15 of the block and the high nibbles 16-31.
"""

from __future__ import annotations

import torch

from fitment.dtypes import torch_dtype
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine
from fitment.weights.specs import DenseSpec, WeightSpec


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
    data = torch.frombuffer(raw, dtype=torch.uint8).view(shape[0], -1)
    if interleaved:
        data = data[half_split_order(*interleaved)]
    if isinstance(spec, DenseSpec):
        return Dense(data.view(torch_dtype(spec.dtype)).view(shape))
    groups = shape[1] // spec.group_size
    blocks = data.view(shape[0], groups, -1)
    scales = _halves(blocks, 0, "scales")
    if encoding == "Q8_0":
        codes = blocks[:, :, 2:] ^ 0x80
        return GroupAffine(spec, codes.view(shape), scales, 128)
    if encoding == "Q4_0":
        return GroupAffine(spec, _nibbles(blocks[:, :, 2:]).view(shape), scales, 8)
    assert encoding == "Q4_1", encoding
    return GroupAffine(spec, _nibbles(blocks[:, :, 4:]).view(shape), scales, _halves(blocks, 2, "minimums"))


def half_split_order(heads: int, head_size: int, rotary_size: int) -> torch.Tensor:
    """The row that each row of a half-split layout has in an interleaved one: int64 ``[heads * head_size]``.

    In a head, interleaved pairs (2j, 2j + 1) become rows j and j + rotary_size / 2; rows that are not rotated stay.
    """
    pairs = torch.arange(rotary_size).view(-1, 2).T.reshape(-1)
    head = torch.cat([pairs, torch.arange(rotary_size, head_size)])
    return (torch.arange(heads).unsqueeze(1) * head_size + head).reshape(-1)


def _halves(blocks: torch.Tensor, at: int, what: str) -> torch.Tensor:
    """The fp16 at byte ``at`` of every block: ``[rows, groups]``."""
    values = blocks[:, :, at:at + 2].contiguous().view(torch.float16).squeeze(-1)
    wrong = values.numel() - int(torch.isfinite(values).sum())
    if wrong:
        raise ValueError(f"{wrong} of {values.numel()} {what} are not finite")
    return values


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low nibbles, then high ones, of each block: ``[rows, groups, 16]`` to ``[rows, groups, 2, 16]``."""
    codes = torch.empty(*packed.shape[:2], 2, packed.shape[2], dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=codes[:, :, 0])
    torch.bitwise_right_shift(packed, 4, out=codes[:, :, 1])
    return codes
