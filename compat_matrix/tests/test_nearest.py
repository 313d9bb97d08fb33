"""What the gate offers instead of a refused request: few changes, in words that work, and always something that it admits."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitment.conditions import ALWAYS, any_of, equals, is_in
from fitment.facts import Value
from fitment.kernels import Kernel, Speed
from fitment.plugins import Registry
from fitment.weights.specs import GroupAffineSpec
from fitment_matrix.cli._common import find
from fitment_matrix.gate import Plan, Request, Unfit, admit
from fitment_matrix.testing import ENGINE, all_kernels, isolate, make_request, plugin, register

MIB = 1 << 20
BIG, SMALL = 64 * MIB, 4 * MIB


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)


def toys() -> Registry:
    """Old and new toys, small and big; only new ones have an int8 cache, only big ones a native linear kernel."""
    kernels = all_kernels("toy", without=("linear", "paged_attention", "write_kv"))
    cache = any_of(is_in("kv_dtype", ("fp32", "bf16")), equals("arch", "new"))
    kernels += [Kernel(op, f"toy.{op}", f"made_up_kernels:{op}", cache) for op in ("paged_attention", "write_kv")]
    kernels += [Kernel("linear", "toy.linear", "made_up_kernels:linear", ALWAYS, prepare="made_up_kernels:pack"),
                Kernel("linear", "toy.fast", "made_up_kernels:linear", equals("arch", "new"), Speed.NATIVE,
                       prepare="made_up_kernels:pack")]
    hardware: dict[str, dict[str, Value]] = {
        "old-small": {"arch": "old", "memory_bytes": SMALL}, "old-big": {"arch": "old", "memory_bytes": BIG},
        "new-small": {"arch": "new", "memory_bytes": SMALL}, "new-big": {"arch": "new", "memory_bytes": BIG}}
    devices = {"toy:0": hardware["old-small"], "toy:1": hardware["new-big"]}
    return register(plugin("toy", kernels, hardware, abilities={"graph_capture": equals("arch", "new")}, devices=devices))


def refused(request: Request, registry: Registry, where: str, engine: Any = None) -> Unfit:
    """The refusal of a request on a profile or device."""
    with pytest.raises(Unfit) as caught:
        admit(request, find(where, registry), registry, engine)
    return caught.value


def offers(request: Request, registry: Registry, where: str) -> list[str]:
    return [near.options for near in refused(request, registry, where).nearest]


def test_a_cache_type_of_newer_hardware() -> None:
    found = refused(make_request(kv_dtype="int8"), toys(), "old-big")
    assert [near.options for near in found.nearest] == ["--kv-cache-dtype bf16", "--hardware new-small", "--hardware new-big"]
    assert [near.sentence for near in found.nearest] == [
        "safetensors portable, 512 tokens, bf16 cache, no graphs", "everything as asked", "everything as asked"]


def test_one_change_is_offered_before_other_hardware_and_that_by_speed_then_size() -> None:
    assert offers(make_request(kv_dtype="int8", features=("graph_capture",)), toys(), "old-big") == [
        "--kv-cache-dtype bf16 without --feature graph_capture", "--hardware new-small", "--hardware new-big"]


def test_from_a_device_other_devices_come_first() -> None:
    found = refused(make_request(kv_dtype="int8"), toys(), "toy:0")
    assert [near.options for near in found.nearest] == ["--kv-cache-dtype bf16", "--device toy:1", "--hardware new-small"]
    assert "--device toy:1" in str(found)
    assert "--hardware" not in str(found), "a message that the engine prints offers what the engine can do"


def test_what_does_not_exist_is_left_out() -> None:
    assert offers(make_request(features=("telepathy", "sampling")), toys(), "new-big") == ["without --feature telepathy"]


def test_numbers_out_of_range_become_the_defaults() -> None:
    found = offers(make_request(max_num_seqs=0, max_batch_tokens=-3), toys(), "new-big")
    assert found == ["--max-num-seqs 64 --max-batch-tokens 2048"]


def test_a_context_beyond_the_model_becomes_the_models() -> None:
    assert offers(make_request(max_model_len=100_000), toys(), "new-big") == ["--max-model-len 512"]


def test_a_cache_that_is_too_small_is_offered_with_what_one_sequence_takes() -> None:
    [first, *_] = offers(make_request(max_model_len=512, kv_memory_bytes=1), toys(), "new-big")
    assert first == "--kv-memory 128K", "32 blocks of 4096 bytes"


def test_a_smaller_step_is_halved_no_further_than_it_must() -> None:
    found = refused(make_request(max_batch_tokens=100_000), toys(), "new-big")
    assert found.nearest[0].options == "--max-batch-tokens 25000"


def test_nothing_is_offered_when_no_option_helps() -> None:
    request = make_request(model=replace(make_request().model, unserved=("alibi = True",)))
    assert refused(request, toys(), "new-big").nearest == ()
    assert "Nearest" not in str(refused(request, toys(), "new-big"))


def options() -> st.SearchStrategy[dict[str, Any]]:
    """Requests of all sorts, most of them wrong somewhere."""
    dtypes = st.sampled_from([None, "fp32", "bf16", "int8", "nonsense"])
    features = st.lists(st.sampled_from(["graph_capture", "sampling", "lora", "kv_cache.int8", "kv_cache.bf16", "multi_step",
                                         "chunked_prefill", "telepathy"]), max_size=3, unique=True).map(tuple)
    return st.fixed_dictionaries({
        "dtype": dtypes, "activations": dtypes, "kv_dtype": dtypes, "features": features,
        "max_model_len": st.sampled_from([None, 0, 1, 100, 512, 513]), "max_num_seqs": st.sampled_from([0, 1, 64, 10_000]),
        "max_batch_tokens": st.sampled_from([0, 1, 300, 2048, 10_000_000]),
        "kv_memory_bytes": st.sampled_from([None, 0, 1, MIB, 1 << 40]),
        "kernels": st.sampled_from([{}, {"linear": "toy.fast"}, {"linear": "nobody"}]),
    })


@settings(max_examples=60, deadline=None)
@given(options(), st.sampled_from(["old-small", "new-big", "toy:0"]), st.sampled_from([None, GroupAffineSpec(4, 32, "constant")]),
       st.sampled_from([None, ENGINE]))
def test_what_is_admitted_fits_and_what_is_offered_is_admitted(asked: dict[str, Any], where: str, spec: Any, engine: Any) -> None:
    registry = toys()
    request, place = make_request(spec, **asked), find(where, registry)
    try:
        check_plan(request, admit(request, place, registry, engine))
    except Unfit as unfit:
        check_refusal(request, unfit, registry, engine)


def check_plan(request: Request, plan: Plan) -> None:
    """An admitted request gets what it asked for, and no more memory than there is."""
    assert plan.memory.usable is not None
    assert plan.memory.total <= plan.memory.usable
    assert plan.num_blocks * plan.kv_layout.block_size >= plan.max_model_len
    for name in ("dtype", "activations", "kv_dtype", "max_model_len", "max_num_seqs", "max_batch_tokens"):
        assert getattr(request, name) in (None, getattr(plan, name))


def check_refusal(request: Request, unfit: Unfit, registry: Registry, engine: Any) -> None:
    """A refused one gets reasons, and at most three offers that the gate admits."""
    assert unfit.reasons
    assert len(unfit.nearest) <= 3
    for near in unfit.nearest:
        again = admit(near.request, near.where, registry, engine)
        assert shlex.split(near.options)
        assert set(again.features) <= set(request.features), "nothing is added that nobody asked for"
        assert near.where != unfit.where or near.request != request
