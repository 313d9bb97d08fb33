"""Features: what an operator can turn on. Support on a piece of hardware is derived from what a feature needs, never typed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fitment.facts import Facts
from fitment.ops import Need


@dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        name: What it is called on the command line.
        doc: One sentence.
        needs: Ops with the facts of the call that make the feature work.
        abilities: Platform abilities that it needs, by name.
        conflicts: Features that it cannot be combined with, each with the reason.
    """

    name: str
    doc: str
    needs: tuple[Need, ...] = ()
    abilities: tuple[str, ...] = ()
    conflicts: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)


ABILITIES: Mapping[str, str] = {
    "graph_capture": "a step can be captured once and replayed",
    "async_copy": "memory is copied while the device computes",
    "collectives": "devices exchange tensors (all-reduce, all-gather)",
    "point_to_point": "one device sends a tensor to another",
    "kv_transfer": "blocks of the key-value cache move between processes",
}
"""What a platform can do beside running kernels, by name."""


def _attention(**facts: str | int) -> Need:
    return Need("paged_attention", Facts(facts), "attention")


def _kv_cache(dtype: str, words: str) -> Feature:
    facts = Facts({"kv_dtype": dtype})
    return Feature(f"kv_cache.{dtype}", f"The key-value cache holds {words}.",
                   (Need("paged_attention", facts, "attention"), Need("write_kv", facts, "cache writes")))


_ENCODER = Need("encoder_attention", Facts(), "the encoder")
_NOT_SPEC = "drafted tokens are verified in one batch, which this cannot follow"

_FEATURES = (
    Feature("continuous_batching", "Requests join and leave the running batch at every step.", (_attention(query_length=1),)),
    Feature("chunked_prefill", "Long prompts are computed in pieces between other requests' tokens.",
            (_attention(query_length=512),)),
    Feature("prefix_caching", "Prompts that begin alike share the computed blocks.", (_attention(query_length=512),)),
    Feature("graph_capture", "Decode steps are captured and replayed.", abilities=("graph_capture",)),
    _kv_cache("fp32", "32-bit floats"),
    _kv_cache("bf16", "bfloat16"),
    _kv_cache("fp16", "16-bit floats"),
    _kv_cache("fp8_e4m3fn", "8-bit floats (OCP E4M3) with scales"),
    _kv_cache("fp8_e4m3fnuz", "8-bit floats (E4M3 without negative zero) with scales"),
    _kv_cache("int8", "8-bit integers with scales"),
    Feature("sampling", "Temperature, top-k, top-p and min-p sampling on the device.", (Need("sample", Facts(), "sampling"),)),
    Feature("logprobs", "Log-probabilities of generated tokens."),
    Feature("prompt_logprobs", "Log-probabilities of the prompt's tokens."),
    Feature("seeded_sampling", "A seed per request that repeats its tokens, whatever else is in the batch.",
            (Need("sample", Facts(), "sampling"),)),
    Feature("structured_output", "Output held to a grammar or a JSON schema."),
    Feature("beam_search", "Several continuations are kept and the best returned."),
    Feature("speculative.ngram", "Drafts from the prompt's own text, verified in one step.", (_attention(query_length=8),),
            conflicts={"pipeline_parallel": "a draft is verified where all layers are", "beam_search": _NOT_SPEC}),
    Feature("speculative.draft_model", "Drafts from a smaller model, verified in one step.", (_attention(query_length=8),),
            conflicts={"pipeline_parallel": "a draft is verified where all layers are", "beam_search": _NOT_SPEC}),
    Feature("lora", "Adapters per request over one base model.", (Need("lora", Facts(), "adapters"),)),
    Feature("pooling", "Embeddings and scores instead of tokens."),
    Feature("encoder_decoder", "Models with an encoder and cross-attention.",
            (Need("cross_attention", Facts(), "cross-attention"),)),
    Feature("multimodal.image", "Images in the prompt.", (_ENCODER,)),
    Feature("multimodal.audio", "Sound in the prompt.", (_ENCODER,)),
    Feature("multimodal.video", "Video in the prompt.", (_ENCODER,)),
    Feature("prompt_embeds", "Prompts given as embeddings."),
    Feature("async_output", "Output is processed while the next step runs.", abilities=("async_copy",)),
    Feature("multi_step", "Several steps are scheduled at once.", conflicts={"chunked_prefill": "a chunk ends inside the steps"}),
    Feature("tensor_parallel", "Layers split over devices.", abilities=("collectives",)),
    Feature("pipeline_parallel", "Layers distributed over devices.", abilities=("point_to_point",)),
    Feature("disaggregated_prefill", "Prompts are computed elsewhere and their cache is sent.", abilities=("kv_transfer",)),
    Feature("tracing", "A trace per request."),
)

FEATURES: Mapping[str, Feature] = {feature.name: feature for feature in _FEATURES}
"""Every feature by name."""


def conflicts(names: tuple[str, ...]) -> list[str]:
    """A sentence for each pair of ``names`` (known features) that cannot be combined."""
    found = []
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            why = FEATURES[a].conflicts.get(b) or FEATURES[b].conflicts.get(a)
            if why:
                found.append(f"{a} does not combine with {b}: {why}")
    return found
