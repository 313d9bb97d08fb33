"""What a plan takes of memory, and how long a context fits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fitment.conditions import Reason
from fitment.facts import Kind, Value
from fitment.hardware import Device, Hardware, KVLayout
from fitment.kernels import Kernel, Speed
from fitment.weights.specs import ITEMSIZE, GroupAffineSpec, WeightSpec
from fitment_matrix._inventory import Group, Inventory
from fitment_matrix._plan import MemoryEstimate
from fitment_matrix._request import FLAGS, Request

USABLE = 0.9
"""The share of the memory that a plan may take; the rest is for the process and for what is not counted here."""

CACHE_SHARE = 4
"""A cache whose size nobody asked for takes at most one part in so many of what is left, unless one sequence needs more."""

SHORTEST = 256
"""A context that was left open is not shortened below this."""

CODED_BYTES = 24
"""Bytes an element that a reference kernel takes to dequantize codes: codes, product and sum, each in float64."""

Chosen = Mapping[tuple[str, WeightSpec | None], Kernel]
"""The chosen kernels by op and weight."""


def usable_bytes(where: Device | Hardware) -> int | None:
    """Bytes that a plan may take on a device (of what is free) or on a profile (of all); None where that is not known."""
    keys = ("memory_available_bytes", "memory_bytes") if isinstance(where, Device) else ("memory_bytes",)
    found = next((where.facts[key] for key in keys if key in where.facts), None)
    return int(found * USABLE) if isinstance(found, (int, float)) else None


def weight_bytes(inventory: Inventory, kernels: Chosen) -> int:
    """Bytes of all weights as the chosen kernels keep them; vectors are fp32."""
    return sum(count * _kept_bytes(group, kernels) for group, count in inventory.groups.items())


def _kept_bytes(group: Group, kernels: Chosen) -> int:
    """Bytes of one tensor; a tied table that two kernels pack in two ways is kept twice."""
    if group.spec is None:
        return group.nbytes
    if not group.ops:
        return group.elements * ITEMSIZE["fp32"]
    rows, cols = group.shape[0], group.elements // max(1, group.shape[0])
    used = [kernels[op, group.spec] for op in group.ops if (op, group.spec) in kernels]
    packs = {kernel.prepare: kernel for kernel in used}.values()
    return sum(_kept_spec(group.spec, kernel).nbytes(rows, cols) for kernel in packs) or group.spec.nbytes(rows, cols)


def _kept_spec(spec: WeightSpec, kernel: Kernel) -> WeightSpec:
    """What a kernel keeps: packed by its ``prepare``, or the family as it is read, one byte a code."""
    return replace(spec, bits=8) if isinstance(spec, GroupAffineSpec) and kernel.prepare is None else spec


def work_bytes(request: Request, inventory: Inventory, dtype: str, kernels: Chosen) -> int:
    """Bytes of buffers that do not grow with the context: activations of a step, logits, what reference kernels unpack."""
    model = request.model
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_size  # queries, keys, values; the attention's result
    widths = 2 * model.hidden_size + heads + 3 * model.intermediate_size
    unpacked = [_unpacked_bytes(group, kernels) for group in inventory.groups if "linear" in group.ops and group.spec]
    return (request.max_batch_tokens * widths * ITEMSIZE[dtype] + request.max_num_seqs * model.vocab_size * ITEMSIZE["fp32"]
            + max(unpacked, default=0))


def _unpacked_bytes(group: Group, kernels: Chosen) -> int:
    """Bytes that a linear kernel takes to dequantize a weight: none, but for reference kernels."""
    kernel = kernels.get(("linear", group.spec))
    if kernel is None or kernel.speed is not Speed.REFERENCE:
        return 0
    return group.elements * (CODED_BYTES if isinstance(group.spec, GroupAffineSpec) else ITEMSIZE["fp32"])


@dataclass(frozen=True)
class Sizing:
    """How many blocks the cache has and how long a sequence can be, or why there is no answer."""

    max_model_len: int
    num_blocks: int
    memory: MemoryEstimate
    reason: Reason | None = None
    choices: tuple[str, ...] = ()


def size(request: Request, layout: KVLayout, kv_dtype: str, fixed: tuple[int, int], usable: int | None) -> Sizing:
    """Fit the cache into memory.

    Args:
        request: The request; its numbers are in range. A context that it leaves open is the model's own, or what memory holds.
        layout: The platform's.
        kv_dtype: The cache's element type.
        fixed: Bytes of weights and of work.
        usable: Bytes that may be taken; None when nobody knows, which is then not checked.
    """
    bill = _Bill(request, layout, kv_dtype, fixed, usable)
    own = min(request.model.max_position, request.model.sliding_window or request.model.max_position)
    context = request.max_model_len or own
    one = bill.blocks(context)
    most = one * request.max_num_seqs
    room = bill.room()
    choices = [] if request.max_model_len else [f"max_model_len is {own}, the model's own"]
    if room < one:
        least = one if request.max_model_len else min(one, bill.blocks(SHORTEST))
        if room < least:
            return bill.refused(least, min(context, least * layout.block_size))
        one, context = room, room * layout.block_size
        choices = [f"max_model_len is shortened from {own} to {context}, what memory holds of one sequence"]
    if request.kv_memory_bytes is not None:
        blocks = request.kv_memory_bytes // bill.block_bytes
        if usable is not None and bill.memory(blocks, context).total > usable:
            return bill.refused(blocks, blocks * layout.block_size)
    else:
        blocks = min(most, max(one, room // CACHE_SHARE))
        held, full = blocks * layout.block_size, most * layout.block_size
        asked = "" if held == full else f" of the {full} that {request.max_num_seqs} full sequences would take"
        choices.append(f"the cache holds {held} tokens{asked}")
    if usable is None:
        choices.append("memory was not checked: how much of it this hardware has is not known")
    return Sizing(context, blocks, bill.memory(blocks, context), None, tuple(choices))


@dataclass(frozen=True)
class _Bill:
    """What a cache of so many blocks costs beside the weights and the work."""

    request: Request
    layout: KVLayout
    kv_dtype: str
    fixed: tuple[int, int]
    usable: int | None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers."""
        model = self.request.model
        return model.num_layers * self.layout.block_bytes(model.num_kv_heads, model.head_size, ITEMSIZE[self.kv_dtype])

    @property
    def rope_bytes(self) -> int:
        """Bytes of the cosines and sines (fp32) of one block's positions."""
        model = self.request.model
        return self.layout.block_size * (model.rotary_size or model.head_size) * ITEMSIZE["fp32"]

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens of one sequence."""
        return -(-tokens // self.layout.block_size)

    def room(self) -> int:
        """Blocks that one sequence can have, of the operator's limit and of memory; without end where neither is known."""
        limit = self.request.kv_memory_bytes
        held = sys.maxsize if limit is None else limit // self.block_bytes
        if self.usable is None:
            return held
        return min(held, max(0, self.usable - sum(self.fixed)) // (self.block_bytes + self.rope_bytes))

    def memory(self, blocks: int, context: int) -> MemoryEstimate:
        """The estimate for a cache of ``blocks`` and sequences of up to ``context`` tokens."""
        weights, work = self.fixed
        return MemoryEstimate(weights, blocks * self.block_bytes, work + self.blocks(context) * self.rope_bytes, self.usable)

    def refused(self, blocks: int, tokens: int) -> Sizing:
        """Why a cache of ``blocks`` (of ``tokens``) cannot be: the operator's limit on it, or memory."""
        memory, limit = self.memory(blocks, tokens), self.request.kv_memory_bytes
        if limit is not None and limit < memory.cache:
            reason = Reason("FIT-REQ-KV-MEMORY-BYTES", Kind.REQUEST, "kv_memory_bytes",
                            f"{gib(memory.cache)} of cache for one sequence of {tokens} tokens", gib(limit),
                            FLAGS["kv_memory_bytes"])
        else:
            total = f"weights {gib(memory.weights)} + {tokens} tokens of cache {gib(memory.cache)} + work {gib(memory.work)}"
            reason = Reason("FIT-REQ-MEMORY", Kind.REQUEST, "usable memory", f"{total} = {gib(memory.total)}",
                            gib(memory.usable or 0), f"{FLAGS['max_model_len']}, a smaller model or more memory")
        return Sizing(tokens, blocks, memory, reason)


def gib(number: Value) -> str:
    """Bytes in the largest unit of which there is at least one: ``14.2 GiB``."""
    amount = float(number)  # type: ignore[arg-type]
    if amount < 1024:
        return f"{amount:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024 or unit == "GiB":
            break
    return f"{amount:.1f} {unit}"
