"""The arguments of a call on a device, in buffers that show what should not have been touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fitment.ops._cases._case import Arg, Argument, Call, Role, Same
from fitment.ops._cases._compare import same_bits
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine

CANONICAL = ("block", "slot", "head", "dim")
GUARD = 64
"""Elements before and after a buffer, at least; as many more as it takes to hold a row."""

LEFT, RIGHT = 5, 3
"""Columns of the wider buffer beside a strided argument: so few that its rows are not aligned to anything."""

NAN_BYTE, ODD_BYTE = 0xFF, 0xA5
"""What guards and outputs are filled with: all floats of it are NaN; integers get numbers that nothing gives."""


class Buffer:
    """One tensor argument: ``view`` is what a kernel gets, a part of ``_flat``, whose other elements are guards."""

    def __init__(self, arg: Arg, device: torch.device, is_strided: bool) -> None:
        self.role = arg.role
        self._order = arg.order
        shape = tuple(arg.tensor.shape[CANONICAL.index(axis)] for axis in arg.order) if arg.order else tuple(arg.tensor.shape)
        rows = shape[0] if len(shape) > 1 else 1
        left, right = (LEFT, RIGHT) if is_strided and arg.is_strided else (0, 0)
        columns = torch.Size(shape[1:]).numel() if len(shape) > 1 else shape[0]
        width = left + columns + right
        guard = GUARD * (1 + width // GUARD)
        self._flat = torch.empty(guard + rows * width + guard, dtype=arg.tensor.dtype, device=device)
        self.view = self._flat[guard : guard + rows * width].view(rows, width)[:, left : left + columns].view(shape)
        self.load(arg)

    def load(self, arg: Arg) -> None:
        """Fill the guards, then write an input's values, or poison an output."""
        byte = NAN_BYTE if self._flat.is_floating_point() else ODD_BYTE
        self._flat.view(torch.uint8).fill_(byte)
        if self.role is not Role.OUT:
            self.view.copy_(self._permuted(arg.tensor))
        self._before = self._flat.clone()

    def _permuted(self, canonical: torch.Tensor) -> torch.Tensor:
        return canonical.permute([CANONICAL.index(axis) for axis in self._order]) if self._order else canonical

    def values(self) -> torch.Tensor:
        """What the argument holds now, on the host; a cache as ``[block, slot, head, dim]``."""
        return self._restored(self.view)

    def before(self) -> torch.Tensor:
        """Likewise what it held when it was loaded."""
        return self._restored(self._before.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()))

    def _restored(self, view: torch.Tensor) -> torch.Tensor:
        host = view.detach().to("cpu", copy=True)
        return host.permute([self._order.index(axis) for axis in CANONICAL]).contiguous() if self._order else host

    def problem(self) -> str:
        """What was changed that must not be; "" when nothing was."""
        changed = ~same_bits(self._flat, self._before)
        inside = changed.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        if self.role is Role.IN and bool(inside.any()):
            return f"it is an input and was changed at {inside.nonzero()[0].tolist()}"
        inside.fill_(False)
        if bool(changed.any()):
            first = int(changed.nonzero()[0]) - self.view.storage_offset()
            return f"{int(changed.sum())} elements around it were written; the first lies {first} from its first element"
        return ""


class Buffers:
    """All arguments of a call: ``args`` are what a kernel gets, in the op's order.

    Args:
        call: The arguments on the host.
        weights: What the kernel gets for each argument that is a weight.
        device: Where the buffers are.
        is_strided: Whether arguments that may be strided are.
    """

    def __init__(self, call: Call, weights: dict[str, Any], device: torch.device, is_strided: bool) -> None:
        self._buffers = {name: Buffer(arg, device, is_strided) for name, arg in call.items() if isinstance(arg, Arg)}
        self.args = [self._given(name, argument, weights) for name, argument in call.items()]

    def _given(self, name: str, argument: Argument, weights: dict[str, Any]) -> Any:
        if isinstance(argument, Arg):
            return self._buffers[name].view
        if isinstance(argument, Same):
            return self._buffers[argument.name].view
        return weights[name] if isinstance(argument, Dense | GroupAffine) else argument

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor argument ``name``, as a kernel gets it."""
        return self._buffers[name].view

    def load(self, call: Call) -> None:
        """Put the contents of another call of the same shapes into the same buffers."""
        for name, buffer in self._buffers.items():
            argument = call[name]
            assert isinstance(argument, Arg)
            buffer.load(argument)

    def outputs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """What each output holds now, and what it held before, on the host."""
        return {name: (buffer.values(), buffer.before()) for name, buffer in self._buffers.items() if buffer.role is not Role.IN}

    def problems(self) -> Iterator[str]:
        """A sentence for each argument around or in which something was changed that must not be."""
        for name, buffer in self._buffers.items():
            if problem := buffer.problem():
                yield f"{name}: {problem}"
