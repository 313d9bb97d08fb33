"""What a plan takes of memory, and how long a context fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fitment.conditions import Reason
from fitment.facts import Kind, Value
from fitment.hardware import Device, Hardware, KVLayout
from fitment.kernels import Kernel, Speed
from fitment.weights.specs import ITEMSIZE, GroupAffineSpec, WeightSpec
from fitment_matrix._plan import MemoryEstimate
from fitment_matrix._request import EMBEDDING, Request

USABLE = 0.9
"""The share of the memory that a plan may take; the rest is for the process and for what is not counted here."""

CACHE_SHARE = 4
"""A cache whose size nobody asked for takes at most one part in so many of what is left, unless one sequence needs more."""

SHORTEST = 256
"""A context that was left open is not shortened below this."""

UNPACKED_BYTES = {"dense": 4, "group_affine": 24}
"""Bytes an element that a reference kernel takes while it dequantizes: fp32, or codes, product and sum in float64."""

Chosen = Mapping[tuple[str, WeightSpec | None], Kernel]
"""The chosen kernels by op and weight."""


def usable_bytes(where: Device | Hardware) -> int | None:
    """Bytes that a plan may take on a device (of what is free) or on a profile (of all); None where that is not known."""
    keys = ("memory_available_bytes", "memory_bytes") if isinstance(where, Device) else ("memory_bytes",)
    found = next((where.facts[key] for key in keys if key in where.facts), None)
    return int(found * USABLE) if isinstance(found, (int, float)) else None


def weight_bytes(request: Request, kernels: Chosen) -> int:
    """Bytes of all weights as the chosen kernels keep them; vectors are fp32."""
    total = 0
    for info in request.tensors.values():
        if info.spec is None:
            total += info.nbytes
        elif len(info.shape) < 2:
            total += ITEMSIZE["fp32"] * _elements(info.shape)
        else:
            shape = (info.shape[0], _elements(info.shape[1:]))
            ops = ("embedding", "linear") if info.name == EMBEDDING and request.model.tie_embeddings else (
                ("embedding",) if info.name == EMBEDDING else ("linear",))
            used = [kernels[op, info.spec] for op in ops if (op, info.spec) in kernels]
            kept = {kernel.prepare or "": kernel for kernel in used}  # a tied table is packed once for each way to pack it
            total += sum(_kept_spec(info.spec, kernel).nbytes(*shape) for kernel in kept.values()) or info.spec.nbytes(*shape)
    return total


def _kept_spec(spec: WeightSpec, kernel: Kernel) -> WeightSpec:
    """What a kernel keeps: packed by its ``prepare``, or the family as it is read, one byte a code."""
    return replace(spec, bits=8) if isinstance(spec, GroupAffineSpec) and kernel.prepare is None else spec


def _elements(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


def work_bytes(request: Request, dtype: str, kernels: Chosen) -> int:
    """Bytes of buffers that do not grow with the context: activations of a step, logits, what reference kernels unpack."""
    model = request.model
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_size  # queries, keys, values; the attention's result
    widths = 2 * model.hidden_size + heads + 3 * model.intermediate_size
    unpacked = [UNPACKED_BYTES[str(info.spec.facts()["weight.family"])] * _elements(info.shape)
                for info in request.tensors.values() if info.spec is not None and request.is_linear(info)
                and (kernel := kernels.get(("linear", info.spec))) is not None and kernel.speed is Speed.REFERENCE]
    return (request.max_batch_tokens * widths * ITEMSIZE[dtype] + request.max_num_seqs * model.vocab_size * ITEMSIZE["fp32"]
            + max(unpacked, default=0))


@dataclass(frozen=True)
class Sizing:
    """How many blocks the cache has and how long a sequence can be, or why there is no answer."""

    max_model_len: int
    num_blocks: int
    memory: MemoryEstimate
    reason: Reason | None = None
    choices: tuple[str, ...] = ()


def size(request: Request, context: int, is_open: bool, layout: KVLayout, kv_dtype: str, fixed: tuple[int, int],
         usable: int | None) -> Sizing:
    """Fit the cache into memory.

    Args:
        request: The request; its numbers are in range.
        context: Tokens of the longest sequence.
        is_open: Whether ``context`` may be shortened.
        layout: The platform's.
        kv_dtype: The cache's element type.
        fixed: Bytes of weights and of work.
        usable: Bytes that may be taken; None when nobody knows, which is then not checked.
    """
    model = request.model
    block_bytes = model.num_layers * layout.block_bytes(model.num_kv_heads, model.head_size, ITEMSIZE[kv_dtype])
    rope_bytes = layout.block_size * (model.rotary_size or model.head_size) * ITEMSIZE["fp32"]  # cosines and sines of a block's tokens
    weights, work = fixed

    def sizing(tokens: int, blocks: int, reason: Reason | None = None, *choices: str) -> Sizing:
        table = -(-tokens // layout.block_size) * rope_bytes
        return Sizing(tokens, blocks, MemoryEstimate(weights, blocks * block_bytes, work + table, usable), reason, choices)

    one = -(-context // layout.block_size)
    most = one * request.max_num_seqs
    room = most if usable is None else max(0, usable - weights - work) // (block_bytes + rope_bytes)
    if request.kv_memory_bytes is not None:
        room = min(room, request.kv_memory_bytes // block_bytes)
    choices = []
    if room < one:
        shortest = -(-min(SHORTEST, context) // layout.block_size)
        if not is_open or room < shortest:
            wanted = shortest if is_open else one
            tokens = min(context, wanted * layout.block_size)
            tried = sizing(tokens, wanted)
            return replace(tried, reason=_refusal(request, tried, tokens))
        context, one = room * layout.block_size, room
        choices.append(f"max_model_len is shortened from {request.longest()} to {context}, what memory holds of one sequence")
    if request.kv_memory_bytes is not None:
        return sizing(context, request.kv_memory_bytes // block_bytes if room else 0, None, *choices)
    blocks = min(most, room if usable is None else max(one, room // CACHE_SHARE))
    share = "" if blocks == most else f", of {most * layout.block_size} that {request.max_num_seqs} full sequences would take"
    choices.append(f"the cache holds {blocks * layout.block_size} tokens{share}")
    return sizing(context, blocks, None, *choices)


def _refusal(request: Request, tried: Sizing, tokens: int) -> Reason:
    """Why the cache of one sequence does not fit: the operator's limit on it, or memory."""
    memory = tried.memory
    if request.kv_memory_bytes is not None and request.kv_memory_bytes < memory.cache:
        return Reason("FIT-REQ-KV-MEMORY-BYTES", Kind.REQUEST, "kv_memory_bytes",
                      f"{gib(memory.cache)} of cache for one sequence of {tokens} tokens", gib(request.kv_memory_bytes), "--kv-memory")
    return memory_reason(memory, tokens)


def memory_reason(memory: MemoryEstimate, tokens: int) -> Reason:
    """The sum that does not fit, spelled out."""
    return Reason("FIT-REQ-MEMORY", Kind.REQUEST, "usable memory",
                  f"weights {gib(memory.weights)} + {tokens} tokens of cache {gib(memory.cache)} + work {gib(memory.work)} "
                  f"= {gib(memory.total)}", gib(memory.usable or 0), "--max-model-len, a smaller model or more memory")


def gib(number: Value) -> str:
    """Bytes in the largest unit that leaves at least one, to three digits: ``14.2 GiB``."""
    amount = float(number)  # type: ignore[arg-type]
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
