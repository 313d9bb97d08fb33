"""GGUF's tables: ggml's tensor types with their block sizes, and metadata value types.

The ``gguf`` package has the same tables; importing it costs 0.15 s and numpy, so they are kept here and a test holds them equal.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml-common.h.
"""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    """A ggml tensor type: ``block_size`` elements of a row take ``block_bytes`` bytes."""

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}
"""Every tensor type by its number in the file; numbers that are missing here were withdrawn."""

BOOL, STRING, ARRAY = 7, 8, 9

SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata value types of a fixed size: their ``struct`` codes, by their number in the file."""
