"""The gate's truth tables: what is admitted and how, what is refused and why, every reason at once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fitment.conditions import ALWAYS, all_of, equals, has, is_in
from fitment.description import RopeScaling
from fitment.errors import FitmentError
from fitment.hardware import Hardware, KVLayout
from fitment.kernels import GraphSafety, Kernel, Speed
from fitment.plugins import Registry
from fitment.weights.specs import DenseSpec, GroupAffineSpec
from fitment_matrix.gate import Request, Unfit, admit
from fitment_matrix.testing import ENGINE, MODEL, all_kernels, isolate, make_request, null_platform, plugin, register

GIB = 1 << 30
Q4 = GroupAffineSpec(4, 32, "constant")


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)


@pytest.fixture
def null() -> Registry:
    """The null platform alone."""
    return null_platform()


def codes(request: Request, registry: Registry, hardware: str = "null", engine: Any = None) -> list[str]:
    """The codes of a refusal."""
    with pytest.raises(Unfit) as caught:
        admit(request, registry.hardware[hardware], registry, engine)
    return [reason.code for reason in caught.value.reasons]


def test_what_is_left_open_is_chosen_and_listed(null: Registry) -> None:
    plan = admit(make_request(), null.devices[0], null)
    assert (plan.dtype, plan.activations, plan.kv_dtype) == ("fp32", "fp32", "fp32")
    assert (plan.max_model_len, plan.max_num_seqs, plan.max_batch_tokens) == (512, 64, 2048)
    assert plan.where == "null:0"
    assert plan.hardware == null.hardware["null"]
    assert [sentence.split()[0] for sentence in plan.choices] == ["dtype", "activations", "kv_dtype", "max_model_len", "the"]


def test_every_op_of_the_model_is_bound_and_found_again(null: Registry) -> None:
    plan = admit(make_request(Q4), null.hardware["null"], null)
    ops = [binding.op for binding in plan.bindings]
    assert ops == ["linear", "embedding", "rms_norm", "rotary", "write_kv", "paged_attention", "silu_mul", "sample"]
    assert plan.kernel("linear", Q4).name == "null.reference.linear"
    assert plan.kernel("embedding", Q4).name == "null.reference.embedding"
    assert plan.kernel("sample").name == "null.reference.sample"
    with pytest.raises(LookupError, match="no kernel for linear with Dense fp16"):
        plan.kernel("linear", DenseSpec("fp16"))


def test_an_untied_table_is_no_linear_weight_and_a_tied_one_is() -> None:
    kernels = all_kernels("toy", without=("linear",))
    kernels.append(Kernel("linear", "toy.linear", "made_up_kernels:linear", is_in("weight.family", ("dense",))))
    registry = register(plugin("toy", kernels, {"toy-1": {"memory_bytes": GIB}}))
    request = make_request()
    table = replace(request.tensors["model.embed_tokens.weight"], spec=Q4, encoding="Q4_0")
    tensors = {**request.tensors, "model.embed_tokens.weight": table}
    plan = admit(replace(request, tensors=tensors), registry.hardware["toy-1"], registry)
    assert plan.kernel("embedding", Q4).name == "toy.embedding"
    tied = replace(request, tensors=tensors, model=replace(MODEL, tie_embeddings=True))
    assert codes(tied, registry, "toy-1") == ["FIT-REQ-WEIGHT-FAMILY"]


def test_facts_of_each_call_are_the_models(null: Registry) -> None:
    plan = admit(make_request(Q4, max_batch_tokens=100), null.hardware["null"], null)
    facts = {binding.op: dict(binding.need.facts) for binding in plan.bindings}
    assert facts["linear"] == {"dtype": "fp32", "activations": "fp32", "weight.family": "group_affine", "weight.bits": 4,
                               "weight.group_size": 32, "weight.offset": "constant", "weight.scale_dtype": "fp16"}
    assert facts["paged_attention"] == {"dtype": "fp32", "kv_dtype": "fp32", "head_size": 16, "query_per_kv": 2, "block_size": 16,
                                        "query_length": 100}
    assert facts["write_kv"] == {"dtype": "fp32", "kv_dtype": "fp32", "head_size": 16, "query_per_kv": 2, "block_size": 16}
    assert facts["rotary"] == {"dtype": "fp32", "head_size": 16, "rotary_size": 16}
    assert facts["sample"] == {"vocab_size": 320}


def speedy(**speeds: Speed) -> Registry:
    """A platform whose linear layers have a kernel for each dtype in ``speeds``, of that speed."""
    kernels = all_kernels("toy", without=("linear",))
    kernels += [Kernel("linear", f"toy.{dtype}", "made_up_kernels:linear", equals("activations", dtype), speed)
                for dtype, speed in speeds.items()]
    defaults = {"dtype": ("bf16",), "activations": ("bf16", "fp16", "fp32"), "kv_dtype": ("bf16",)}
    return register(plugin("toy", kernels, {"toy-1": {"memory_bytes": GIB}}, defaults=defaults))


@pytest.mark.parametrize(("speeds", "chosen"), [
    ({"bf16": Speed.PORTABLE, "fp16": Speed.PORTABLE, "fp32": Speed.PORTABLE}, "bf16"),
    ({"bf16": Speed.NATIVE, "fp16": Speed.NATIVE}, "bf16"),
    ({"bf16": Speed.REFERENCE, "fp16": Speed.REFERENCE, "fp32": Speed.PORTABLE}, "fp32"),
    ({"bf16": Speed.PORTABLE, "fp32": Speed.NATIVE}, "fp32"),
    ({"fp32": Speed.REFERENCE}, "fp32"),
])
def test_the_first_combination_that_is_as_fast_as_any_is_taken(speeds: dict[str, Speed], chosen: str) -> None:
    registry = speedy(**speeds)
    assert admit(make_request(), registry.hardware["toy-1"], registry).activations == chosen


def test_an_option_that_is_asked_for_is_kept_though_it_is_slower() -> None:
    registry = speedy(bf16=Speed.NATIVE, fp32=Speed.REFERENCE)
    plan = admit(make_request(activations="fp32"), registry.hardware["toy-1"], registry)
    assert plan.activations == "fp32"
    assert not any(sentence.startswith("activations") for sentence in plan.choices)


def test_one_attention_kernel_serves_prefill_and_decode() -> None:
    kernels = all_kernels("toy", without=("paged_attention",))
    kernels += [Kernel("paged_attention", "toy.decode", "made_up_kernels:a", is_in("query_length", (1,)), Speed.NATIVE),
                Kernel("paged_attention", "toy.prefill", "made_up_kernels:a", is_in("query_length", (2048,)), Speed.NATIVE)]
    both = Kernel("paged_attention", "toy.both", "made_up_kernels:a", is_in("query_length", (1, 2048)), Speed.PORTABLE)
    registry = register(plugin("toy", [*kernels, both], {"toy-1": {}}))
    assert admit(make_request(), registry.hardware["toy-1"], registry).kernel("paged_attention").name == "toy.both"
    assert codes(make_request(), register(plugin("toy", kernels, {"toy-1": {}})), "toy-1") == ["FIT-REQ-QUERY-LENGTH"]


def test_a_kernel_that_is_named_is_used_or_refused() -> None:
    kernels = [*all_kernels("toy"), Kernel("linear", "toy.slow", "made_up_kernels:linear", ALWAYS, Speed.REFERENCE),
               Kernel("linear", "toy.int8", "made_up_kernels:linear", equals("activations", "int8"), Speed.NATIVE)]
    registry = register(plugin("toy", kernels, {"toy-1": {"memory_bytes": GIB}}))
    plan = admit(make_request(kernels={"linear": "toy.slow"}), registry.hardware["toy-1"], registry)
    assert plan.kernel("linear").name == "toy.slow"
    assert codes(make_request(kernels={"linear": "toy.nothing"}), registry, "toy-1") == ["FIT-REQ-KERNEL"]
    assert codes(make_request(kernels={"linear": "toy.int8"}, activations="fp32"), registry, "toy-1") == ["FIT-REQ-ACTIVATIONS"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no sequences": ({"max_num_seqs": 0}, "FIT-REQ-MAX-NUM-SEQS"),
    "a number that is none": ({"max_batch_tokens": "many"}, "FIT-REQ-MAX-BATCH-TOKENS"),
    "a negative context": ({"max_model_len": -1}, "FIT-REQ-MAX-MODEL-LEN"),
    "a context beyond the model": ({"max_model_len": 513}, "FIT-REQ-MAX-MODEL-LEN"),
    "no cache": ({"kv_memory_bytes": 0}, "FIT-REQ-KV-MEMORY-BYTES"),
    "a cache too small for the context": ({"kv_memory_bytes": 32 * 8192 - 1, "max_model_len": 512}, "FIT-REQ-KV-MEMORY-BYTES"),
    "a cache larger than memory": ({"kv_memory_bytes": 9 << 30}, "FIT-REQ-MEMORY"),
    "a dtype that is none": ({"dtype": "fp8_e4m3fn"}, "FIT-REQ-DTYPE"),
    "activations that are none": ({"activations": "int3"}, "FIT-REQ-ACTIVATIONS"),
    "a cache that the layout has not": ({"kv_dtype": "int8"}, "FIT-REQ-KV-DTYPE"),
    "a feature that does not exist": ({"features": ("chunked_prefil",)}, "FIT-REQ-FEATURE"),
    "an ability that the platform has not": ({"features": ("tensor_parallel",)}, "FIT-BUILD-ABILITY"),
    "an op that nobody has": ({"features": ("lora",)}, "FIT-OP-LORA"),
    "kernels that no graph holds": ({"features": ("graph_capture",)}, "FIT-BUILD-GRAPH-SAFE"),
    "a feature against an option": ({"features": ("kv_cache.bf16",), "kv_dtype": "fp32"}, "FIT-REQ-CONFLICT"),
    "two caches": ({"features": ("kv_cache.bf16", "kv_cache.fp32")}, "FIT-REQ-CONFLICT"),
    "features that do not combine": ({"features": ("multi_step", "chunked_prefill")}, "FIT-REQ-CONFLICT"),
    "a kernel that is not there": ({"kernels": {"linear": "nobody"}}, "FIT-REQ-KERNEL"),
}


@pytest.mark.parametrize(("options", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_has_its_code(options: dict[str, Any], code: str, null: Registry) -> None:
    assert codes(make_request(**options), null) == [code]


def test_everything_that_is_wrong_is_told_at_once(null: Registry) -> None:
    options = {name: value for given, _ in REFUSED.values() for name, value in given.items()}
    options["features"] = ("telepathy", "tensor_parallel", "lora", "multi_step", "chunked_prefill")
    found = codes(make_request(**options), null, "null-2")
    assert len(found) == len(set(found)) >= 10
    assert "FIT-HW-ARCH" in found


def test_hardware_that_no_kernel_was_made_for_is_one_reason_against_every_op(null: Registry) -> None:
    with pytest.raises(Unfit) as caught:
        admit(make_request(), null.hardware["null-2"], null)
    [reason] = caught.value.reasons
    assert reason.code == "FIT-HW-ARCH"
    assert len(caught.value.subjects[reason]) == 8
    assert str(caught.value).splitlines()[:3] == [
        "null-2 (null_2, 8.0 GiB) cannot run this request: 1 reason.",
        "",
        "  FIT-HW-ARCH  linear BF16, embedding BF16, rms_norm and 5 more need arch = null_1; arch is null_2",
    ]


def test_the_engine_is_asked_for_architecture_features_and_rope_scaling(null: Registry) -> None:
    model = replace(MODEL, architecture="mamba", rope_scaling=RopeScaling("yarn", {"factor": 2.0}))
    found = codes(make_request(model=model, features=("lora",)), null, "null", ENGINE)
    assert found == ["FIT-REQ-ARCHITECTURE", "FIT-REQ-ROPE-SCALING", "FIT-ENV-ENGINE", "FIT-OP-LORA"]
    assert codes(make_request(features=("lora",)), null) == ["FIT-OP-LORA"]


def test_what_a_checkpoint_asks_for_and_nobody_describes_is_refused(null: Registry) -> None:
    model = replace(MODEL, unserved=("attention_bias = True", "num_experts = 8"))
    with pytest.raises(Unfit) as caught:
        admit(make_request(model=model), null.hardware["null"], null)
    assert [(reason.code, reason.wanted) for reason in caught.value.reasons] == [
        ("FIT-REQ-MODEL", "a model without attention_bias = True"), ("FIT-REQ-MODEL", "a model without num_experts = 8")]


def test_tensors_that_the_format_does_not_read_are_refused_by_encoding(null: Registry) -> None:
    request = make_request()
    tensors = {name: replace(info, spec=None, encoding="F8_E4M3") if "mlp" in name else info
               for name, info in request.tensors.items()}
    with pytest.raises(Unfit) as caught:
        admit(replace(request, tensors=tensors), null.hardware["null"], null)
    [reason] = caught.value.reasons
    assert reason.code == "FIT-REQ-FORMAT"
    assert reason.found == "F8_E4M3 in 6 of them, first model.layers.0.mlp.gate_proj.weight"
    assert reason.wanted == "tensors in F32 F16 BF16"


@pytest.mark.parametrize(("scaling", "longest"), [
    (None, 512),
    (RopeScaling("linear", {"factor": 4.0}), 2048),
    (RopeScaling("yarn", {"factor": 4.0, "original_max_position_embeddings": 256.0}), 1024),
    (RopeScaling("llama3", {"factor": 8.0, "original_max_position_embeddings": 32.0}), 512),
])
def test_rotary_scaling_lengthens_what_may_be_asked_for(scaling: RopeScaling | None, longest: int, null: Registry) -> None:
    model = replace(MODEL, rope_scaling=scaling)
    hardware = null.hardware["null"]
    assert admit(make_request(model=model, max_model_len=longest), hardware, null).max_model_len == longest
    assert codes(make_request(model=model, max_model_len=longest + 1), null) == ["FIT-REQ-MAX-MODEL-LEN"]
    assert admit(make_request(model=model), hardware, null).max_model_len == 512


def test_a_sliding_window_bounds_the_context(null: Registry) -> None:
    model = replace(MODEL, sliding_window=128)
    assert admit(make_request(model=model), null.hardware["null"], null).max_model_len == 128
    assert codes(make_request(model=model, max_model_len=129), null) == ["FIT-REQ-SLIDING-WINDOW"]


def test_a_feature_pins_the_option_that_it_is(null: Registry) -> None:
    plan = admit(make_request(features=("kv_cache.bf16",)), null.hardware["null"], null)
    assert (plan.kv_dtype, plan.features) == ("bf16", ("kv_cache.bf16",))


def captured(**changes: Any) -> tuple[int, ...]:
    """The graph sizes on a platform that captures where ``isa`` has it, with one kernel's safety changed."""
    safety = changes.pop("safety", {})
    kernels = [replace(kernel, graph_safe=safety.get(kernel.op, GraphSafety.ALWAYS)) for kernel in all_kernels("toy")]
    facts = {"toy-1": {"isa": frozenset(changes.pop("isa", ("tape",)))}}
    registry = register(plugin("toy", kernels, facts, abilities={"graph_capture": has("isa", "tape")}))
    return admit(make_request(**changes), registry.hardware["toy-1"], registry).graph_batch_sizes


def test_graphs_are_for_powers_of_two_and_multiples_of_eight() -> None:
    assert captured() == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert captured(max_num_seqs=1) == (1,)
    assert captured(max_num_seqs=3) == (1, 2, 3)
    assert captured(max_num_seqs=12) == (1, 2, 4, 8, 12)
    assert captured(max_num_seqs=64, max_batch_tokens=9) == (1, 2, 4, 8, 9)


def test_graphs_need_the_ability_and_kernels_that_can_be_captured() -> None:
    assert captured(isa=()) == ()
    assert captured(safety={"rms_norm": GraphSafety.NEVER}) == ()
    assert captured(safety={"paged_attention": GraphSafety.SINGLE_TOKEN})
    assert captured(safety={"sample": GraphSafety.NEVER}), "sampling is outside the captured step"


def test_an_engine_without_graphs_gets_none() -> None:
    registry = register(plugin("toy", all_kernels("toy"), {"toy-1": {}}, abilities={"graph_capture": ALWAYS}))
    bare = replace(ENGINE, features=("sampling",))
    assert admit(make_request(), registry.hardware["toy-1"], registry, ENGINE).graph_batch_sizes
    assert not admit(make_request(), registry.hardware["toy-1"], registry, bare).graph_batch_sizes


def test_a_cache_type_that_the_layout_has_not_is_no_candidate() -> None:
    layout = KVLayout("toy", 16, ("block", "slot", "head", "dim"), ("block", "slot", "head", "dim"), ("fp16",))
    registry = register(plugin("toy", all_kernels("toy"), {"toy-1": {}}, layout=layout, defaults={"kv_dtype": ("bf16", "fp32")}))
    assert admit(make_request(), registry.hardware["toy-1"], registry).kv_dtype == "fp16"


def test_a_missing_fact_is_unknown_and_refused_as_such() -> None:
    kernels = all_kernels("toy", condition=all_of(equals("arch", "t1"), has("isa", "x")))
    registry = register(plugin("toy", kernels, {"toy-1": {"arch": "t1"}}))
    with pytest.raises(Unfit) as caught:
        admit(make_request(), registry.hardware["toy-1"], registry)
    assert [(reason.code, reason.unknown) for reason in caught.value.reasons] == [("FIT-HW-ISA", True)]


def test_hardware_of_a_platform_that_is_not_installed_is_an_error(null: Registry) -> None:
    with pytest.raises(FitmentError, match="platform 'acme' is not installed; installed are null"):
        admit(make_request(), Hardware("a1", "acme", "", null.hardware["null"].facts), null)


def test_a_plan_says_everything_as_json_and_its_digest_follows(null: Registry) -> None:
    plan = admit(make_request(), null.hardware["null"], null)
    data = json.loads(json.dumps(plan.to_json()))
    assert data["memory"]["total"] == plan.memory.total
    assert data["bindings"][0]["kernel"] == "null.reference.linear"
    assert data["request"]["encodings"] == {"BF16": 16, "F32": 5}
    assert plan.digest == admit(make_request(), null.hardware["null"], null).digest
    assert plan.digest != admit(make_request(max_num_seqs=63), null.hardware["null"], null).digest
