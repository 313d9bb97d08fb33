"""Packing: from a weight family to what the native kernels stream (``native/pack.h``)."""

from __future__ import annotations

import torch

from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine
from fitment_cpu.kernels._launch import TYPES, native


class PackedWeight:
    """A weight ``[rows, cols]`` in tiles of 16 rows.

    Attributes:
        native: The packed weight, which owns its memory.
        shape: ``(rows, cols)``.
        is_affine: Whether it holds codes, which int8 activations need.
    """

    __slots__ = ("is_affine", "native", "shape")

    def __init__(self, packed: native.Weight, is_affine: bool) -> None:
        self.native = packed
        self.shape = (packed.rows, packed.cols)
        self.is_affine = is_affine

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.native.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Its values ``[rows, cols]``, computed in fp32."""
        rows, cols = self.shape
        out = torch.empty(rows, cols, dtype=torch.float32)
        ids = torch.arange(rows, dtype=torch.int32)
        native.embedding(ids.data_ptr(), out.data_ptr(), self.native, cols, rows, TYPES[out.dtype])
        return out.to(dtype)


def prepare(weight: Dense | GroupAffine) -> PackedWeight:
    """Pack a weight.

    Raises:
        ValueError: it is no matrix, or its group size is not a multiple of 8.
    """
    if len(weight.shape) != 2:
        raise ValueError(f"a weight of shape {weight.shape} cannot be packed; wanted a matrix")
    rows, cols = weight.shape
    if isinstance(weight, Dense):
        values = weight.values.contiguous()
        return PackedWeight(native.pack_dense(TYPES[values.dtype], rows, cols, values.data_ptr(), cols), is_affine=False)
    group = weight.spec.group_size or -(-cols // 8) * 8
    if group % 8:
        raise ValueError(f"GroupAffine {weight.shape}: group size {group} is not a multiple of 8")
    codes = weight.codes.contiguous()
    scale, bias = (values.contiguous() for values in weight.scale_and_bias())
    packed = native.pack_affine(weight.spec.bits, rows, cols, group, codes.data_ptr(), cols, scale.data_ptr(), bias.data_ptr())
    return PackedWeight(packed, is_affine=True)
