"""What a checkpoint's tensors are for: counted once, since the gate looks at them for every combination that it tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from fitment.formats.base import TensorInfo
from fitment.weights.specs import WeightSpec

EMBEDDING = "model.embed_tokens.weight"
"""The tensor that the op ``embedding`` reads; with tied embeddings it is the output layer's weight as well."""


@dataclass(frozen=True)
class Group:
    """Tensors of one shape and encoding: the ops that read them as weights (none: a vector) and how many there are."""

    ops: tuple[str, ...]
    spec: WeightSpec | None
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        """Elements of one of them."""
        return prod(self.shape)


class Inventory:
    """A checkpoint's tensors by use.

    Attributes:
        groups: How many there are of each group.
        weights: For each op that takes weights, what they are, with the format's word for it, in the order of the file.
        unserved: Names of the tensors that the format does not read, by encoding.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], is_tied: bool) -> None:
        self.groups: dict[Group, int] = {}
        self.weights: dict[str, dict[WeightSpec, str]] = {"linear": {}, "embedding": {}}
        self.unserved: dict[str, list[str]] = {}
        for info in tensors.values():
            ops = _ops(info, is_tied)
            group = Group(ops, info.spec, info.shape, info.nbytes)
            self.groups[group] = self.groups.get(group, 0) + 1
            if info.spec is None:
                self.unserved.setdefault(info.encoding, []).append(info.name)
                continue
            for op in ops:
                self.weights[op].setdefault(info.spec, info.encoding)


def _ops(info: TensorInfo, is_tied: bool) -> tuple[str, ...]:
    if len(info.shape) < 2:
        return ()
    if info.name == EMBEDDING:
        return ("embedding", "linear") if is_tied else ("embedding",)
    return ("linear",)
