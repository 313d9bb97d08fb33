"""The ops that a model needs, with the facts of their calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fitment.facts import FactRegistry, Facts, Value
from fitment.kernels import Kernel, Selection, Verdict, select
from fitment.ops import Need
from fitment_matrix._request import Request

UNCAPTURED = frozenset(("sample",))
"""Ops outside the step that a graph captures."""


@dataclass(frozen=True)
class Choice:
    """Values of the options in ``OPEN``, as asked or as tried."""

    dtype: str
    activations: str
    kv_dtype: str


def needs(request: Request, choice: Choice, block_size: int) -> Iterator[Need]:
    """Every op of a step of ``request``'s model: linear layers first (each spec once), then in the order of the step."""
    model = request.model
    dtype = Facts({"dtype": choice.dtype})
    heads = Facts({"head_size": model.head_size, "query_per_kv": model.query_per_kv})
    cache = dtype | heads | {"kv_dtype": choice.kv_dtype, "block_size": block_size}
    for spec in request.linear_specs():
        yield Need("linear", dtype | {"activations": choice.activations} | spec.facts(), f"linear, {spec}")
    table = request.embedding_spec()
    if table is not None:
        yield Need("embedding", dtype | table.facts(), f"embedding, {table}")
    yield Need("rms_norm", dtype, "rms_norm")
    yield Need("rotary", dtype | {"head_size": model.head_size, "rotary_size": model.rotary_size or model.head_size}, "rotary")
    yield Need("write_kv", cache, f"write_kv to {choice.kv_dtype}")
    yield Need("paged_attention", cache | {"query_length": request.max_batch_tokens}, f"paged_attention over {choice.kv_dtype}")
    yield Need("silu_mul", dtype, "silu_mul")
    yield Need("sample", Facts({"vocab_size": model.vocab_size}), "sample")


def serve(need: Need, facts: Mapping[str, Value], kernels: Sequence[Kernel], registry: FactRegistry, wanted: str | None) -> Selection:
    """The kernel for ``need`` on hardware with ``facts``.

    A call with a query length is served by one kernel for that length and for single tokens alike: a model binds one attention,
    which prefills, continues and decodes.
    """
    selection = select(need.op, {**facts, **need.facts}, kernels, registry, wanted)
    if need.facts.get("query_length", 1) == 1:
        return selection
    single = {**facts, **need.facts, "query_length": 1}
    verdicts = [Verdict(v.kernel, tuple(dict.fromkeys((*v.reasons, *v.kernel.condition.check(single, registry)))))
                for v in selection.trace]
    verdicts.sort(key=lambda verdict: not verdict.is_admitted)
    chosen = verdicts[0].kernel if verdicts and verdicts[0].is_admitted else None
    return Selection(need.op, chosen, tuple(verdicts))
