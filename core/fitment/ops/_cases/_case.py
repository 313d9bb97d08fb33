"""What a case is: facts, arguments on the host, and what must come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from fitment.facts import Facts
from fitment.kernels import GraphSafety
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine


class Role(StrEnum):
    """What the contract lets a kernel do with a tensor: read it, write it, or both."""

    IN = "in"
    OUT = "out"
    INOUT = "inout"


@dataclass(frozen=True, eq=False)
class Arg:
    """A tensor argument, on the host.

    Attributes:
        tensor: Its values; of an output only shape and dtype count.
        role: What a kernel may do with it.
        is_strided: Whether the contract lets its first axis be strided (columns of a wider buffer).
        order: For a cache, the platform's order of axes; ``tensor`` is ``[block, slot, head, dim]``.
    """

    tensor: torch.Tensor
    role: Role = Role.IN
    is_strided: bool = False
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class Same:
    """An argument that is the very tensor of another one."""

    name: str


Argument = Arg | Same | Dense | GroupAffine | float | None
Call = Mapping[str, Argument]
"""The arguments of one call by name, in the order of the op's parameters."""


class Expected(Protocol):
    """What must be in an output."""

    def problem(self, got: torch.Tensor, before: torch.Tensor) -> str:
        """What is wrong with ``got``, the output after the call, which held ``before``; "" when nothing is."""


@dataclass(frozen=True, eq=False)
class Case:
    """One call of an op.

    Attributes:
        name: Unique among the op's cases.
        facts: The request facts of the call, those that a plan knows.
        build: The arguments for a seed: shapes, weights and scalars are the same for all seeds, contents differ.
        expect: What must come out of a call, by the name of the output.
        batch: How graph-safe a kernel must be for this call to be captured.
    """

    name: str
    facts: Facts
    build: Callable[[int], Call]
    expect: Callable[[Call], Mapping[str, Expected]]
    batch: GraphSafety = GraphSafety.SINGLE_TOKEN


def tensor(call: Call, name: str) -> torch.Tensor:
    """A tensor argument's values."""
    argument = call[name]
    assert isinstance(argument, Arg)
    return argument.tensor
