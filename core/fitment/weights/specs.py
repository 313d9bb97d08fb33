"""What a weight is, without its values: enough to select a kernel and to count bytes."""

from __future__ import annotations

from dataclasses import dataclass

from fitment.facts import Facts

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3fn": 1, "fp8_e4m3fnuz": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1}
"""Bytes of one element, by dtype name."""

DENSE_DTYPES = ("fp32", "fp16", "bf16")
OFFSETS = ("constant", "zero_points", "minimums")


@dataclass(frozen=True)
class DenseSpec:
    """One value an element, in ``dtype`` (fp32, fp16 or bf16)."""

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DENSE_DTYPES:
            raise ValueError(f"DenseSpec: dtype {self.dtype!r} is none of {', '.join(DENSE_DTYPES)}")

    def facts(self) -> Facts:
        """The request facts that kernels' conditions look at."""
        return Facts({"weight.family": "dense", "weight.dtype": self.dtype, "weight.bits": 8 * ITEMSIZE[self.dtype]})

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of a packed weight of this shape."""
        return rows * cols * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"Dense {self.dtype}"


@dataclass(frozen=True)
class GroupAffineSpec:
    """Unsigned integer codes of ``bits`` bits in groups of ``group_size`` along a row (0: the whole row).

    ``offset`` says how a group maps codes to values: ``constant`` w = s (c - z) with one z for the tensor, ``zero_points``
    w = s (c - z[g]), ``minimums`` w = s c + m[g]. ``scale_dtype`` is the type of s, and of m.
    """

    bits: int
    group_size: int
    offset: str
    scale_dtype: str = "fp16"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"GroupAffineSpec: bits {self.bits!r} is not in 2..8")
        if self.group_size < 0:
            raise ValueError(f"GroupAffineSpec: group_size {self.group_size!r} is negative; 0 is the whole row")
        if self.offset not in OFFSETS:
            raise ValueError(f"GroupAffineSpec: offset {self.offset!r} is none of {', '.join(OFFSETS)}")
        if self.scale_dtype not in DENSE_DTYPES:
            raise ValueError(f"GroupAffineSpec: scale_dtype {self.scale_dtype!r} is none of {', '.join(DENSE_DTYPES)}")

    def facts(self) -> Facts:
        """The request facts that kernels' conditions look at."""
        return Facts({"weight.family": "group_affine", "weight.bits": self.bits, "weight.group_size": self.group_size,
                      "weight.offset": self.offset, "weight.scale_dtype": self.scale_dtype})

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of a packed weight of this shape: codes, scales, and an offset of the scale's type where groups have one."""
        groups = rows * (cols // self.group_size if self.group_size else 1)
        per_group = ITEMSIZE[self.scale_dtype] * (1 if self.offset == "constant" else 2)
        return (rows * cols * self.bits + 7) // 8 + groups * per_group

    def __str__(self) -> str:
        return f"GroupAffine {self.bits}-bit, groups of {self.group_size or 'a row'}, {self.offset}"


WeightSpec = DenseSpec | GroupAffineSpec
