"""The ops that a model needs, with the facts of their calls."""

from __future__ import annotations

from collections.abc import Iterator

from fitment.facts import Facts
from fitment.ops import Need
from fitment_matrix._inventory import Inventory
from fitment_matrix._request import Request
from fitment_matrix._trials import Choice


def needs(request: Request, inventory: Inventory, choice: Choice, block_size: int) -> Iterator[Need]:
    """Every op of a step of ``request``'s model: linear layers first (each spec once), then in the order of the step."""
    model = request.model
    dtype = Facts({"dtype": choice.dtype})
    cache = dtype | {"kv_dtype": choice.kv_dtype, "block_size": block_size, "head_size": model.head_size,
                     "query_per_kv": model.query_per_kv}
    for spec, encoding in inventory.weights["linear"].items():
        yield Need("linear", dtype | {"activations": choice.activations} | spec.facts(), f"linear {encoding}")
    for spec, encoding in inventory.weights["embedding"].items():
        yield Need("embedding", dtype | spec.facts(), f"embedding {encoding}")
    yield Need("rms_norm", dtype, "rms_norm")
    yield Need("rotary", dtype | {"head_size": model.head_size, "rotary_size": model.rotary_size or model.head_size}, "rotary")
    yield Need("write_kv", cache, f"write_kv to {choice.kv_dtype}")
    yield Need("paged_attention", cache | {"query_length": request.max_batch_tokens}, f"paged_attention over {choice.kv_dtype}")
    yield Need("silu_mul", dtype, "silu_mul")
    yield Need("sample", Facts({"vocab_size": model.vocab_size}), "sample")
