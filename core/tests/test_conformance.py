"""The conformance kit: the null platform passes it, and kernels that are broken on purpose do not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fitment
from fitment.conditions import ALWAYS, Condition, equals, is_in
from fitment.conformance import _evidence
from fitment.conformance._round_trip import check_reads_back, round_trips
from fitment.conformance._session import open_session
from fitment.conformance.checks import Bench, Nonconformance, check_agrees, check_captured, check_refuses, check_sources
from fitment.errors import FitmentError
from fitment.facts import Facts
from fitment.graphs import Graph, GraphCapture
from fitment.hardware import Device, KVLayout, Listing
from fitment.hookspecs import hookimpl
from fitment.kernels import GraphSafety, Kernel, sources_digest
from fitment.null.graph import NullGraphCapture
from fitment.ops import OPS
from fitment.ops import op as op_module
from fitment.ops._cases import cases
from fitment.ops._cases._case import Case
from fitment.ops._cases._compare import difference
from fitment.plugins import load
from fitment.weights.dense import Dense
from fitment.weights.group_affine import GroupAffine

Entry = Callable[..., None]
SLOTS_FIRST = ("block", "slot", "head", "dim")
LAYOUT = KVLayout("acme", 16, SLOTS_FIRST, SLOTS_FIRST, ("fp32", "bf16"))
_numbers = count()
FACTS = Facts({"arch": "acme_1", "dtypes": frozenset(("fp32", "bf16"))})


def reference(op: str) -> Entry:
    """Core's own implementation."""
    entry: Entry = op_module(op).reference
    return entry


# ---- A platform of one kernel -----------------------------------------------------------------------------------------------


class Acme:
    """A platform whose kernels and graph capture are made in the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def bench(self, *kernels: Kernel, capture: type[GraphCapture] = NullGraphCapture, layout: KVLayout = LAYOUT) -> Bench:
        """A bench with ``kernels``, loaded as a plugin is."""
        module = self._module()
        hooks: Mapping[str, Callable[[], Any]] = {
            "fitment_devices": lambda: Listing((Device("acme:0", "acme", "", "made up", FACTS),)),
            "fitment_kernels": lambda: kernels,
            "fitment_kv_layout": lambda: layout,
            "fitment_abilities": lambda: {"graph_capture": ALWAYS},
            "fitment_graph_capture": lambda: f"{module.__name__}:Capture",
        }
        vars(module).update({name: hookimpl(hook) for name, hook in hooks.items()}, FITMENT_API=">=1.0,<2", Capture=capture)
        registry = load({"acme": module.__name__})
        assert not [broken for broken in registry.broken if broken.name == "acme"], registry.broken
        return Bench(registry.platforms["acme"], registry, registry.platforms["acme"].listing.devices[0])

    def _module(self) -> ModuleType:
        """An importable module with a name that no other test has: entries are remembered by name."""
        module = ModuleType(f"acme_{next(_numbers)}")
        self._monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    def kernel(self, op: str, entry: Entry, condition: Condition = ALWAYS, prepare: Callable[[Any], Any] | None = None) -> Kernel:
        """A kernel whose entry is a function of the test."""
        module = self._module()
        vars(module).update(entry=entry, prepare=prepare)
        return Kernel(op, module.__name__, f"{module.__name__}:entry", condition,
                      prepare=f"{module.__name__}:prepare" if prepare else None)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Acme:
    return Acme(monkeypatch)


def some_cases(bench: Bench, kernel: Kernel, part: str = "") -> list[Case]:
    """The cases that the kernel's condition admits whose names have ``part``."""
    found = [case for case in cases(kernel.op, bench.platform.kv_layout) if part in case.name and not bench.reasons(kernel, case.facts)]
    assert found, f"no case of {kernel.op} has {part!r} in its name"
    return found


def agree(bench: Bench, kernel: Kernel, part: str = "") -> str:
    """What is wrong with the kernel over its cases; "" when nothing is."""
    return "".join(failures(lambda case: check_agrees(bench, kernel, case), some_cases(bench, kernel, part)))


def failures(check: Callable[[Case], None], over: list[Case]) -> Iterator[str]:
    for case in over:
        try:
            check(case)
        except Nonconformance as error:
            yield f"{error}\n"


# ---- Kernels that agree with their contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("linear", "embedding", "paged_attention")])
def test_a_right_kernel_passes(op: str, acme: Acme) -> None:
    kernel = acme.kernel(op, reference(op))
    bench = acme.bench(kernel)
    for case in some_cases(bench, kernel):
        if "grid" not in case.name:
            check_agrees(bench, kernel, case)
            check_captured(bench, kernel, case)
    check_refuses(bench, kernel, cases(op, LAYOUT))


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_cases_with_unique_names_and_declared_facts(op: str) -> None:
    found = cases(op, LAYOUT)
    names = [case.name for case in found]
    assert len(set(names)) == len(names) > 10
    registry = load().facts
    for case in found:
        assert registry.problems(case.facts) == []


@pytest.mark.parametrize("op", OPS)
def test_a_case_has_the_same_shapes_for_every_seed(op: str) -> None:
    for case in cases(op, LAYOUT):
        if "needle" not in case.name:
            first, second = ({name: getattr(getattr(arg, "tensor", None), "shape", None) for name, arg in case.build(seed).items()}
                             for seed in (0, 1))
            assert first == second, case.name


# ---- Kernels that are broken ------------------------------------------------------------------------------------------------


def silu(x: torch.Tensor, out: torch.Tensor) -> None:
    reference("silu_mul")(x, out)


def one_percent_more(x: torch.Tensor, out: torch.Tensor) -> None:
    silu(x, out)
    out.mul_(1.01)


def one_row_less(x: torch.Tensor, out: torch.Tensor) -> None:
    if out.shape[0] > 1:
        silu(x[:-1], out[:-1])
    else:
        silu(x, out)


def one_column_more(x: torch.Tensor, out: torch.Tensor) -> None:
    silu(x, out)
    out.as_strided((out.shape[0], 1), (out.stride(0), 1), out.storage_offset() + out.shape[1]).fill_(0)


def one_row_more(x: torch.Tensor, out: torch.Tensor) -> None:
    silu(x, out)
    out.as_strided((1, out.shape[1]), (1, 1), out.storage_offset() + out.shape[0] * out.stride(0)).fill_(0)


def packed_output(x: torch.Tensor, out: torch.Tensor) -> None:
    silu(x, out.as_strided(out.shape, (out.shape[1], 1), out.storage_offset()))


def packed_input(x: torch.Tensor, out: torch.Tensor) -> None:
    silu(x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()), out)


def changed_input(x: torch.Tensor, out: torch.Tensor) -> None:
    silu(x, out)
    x[:, : out.shape[1]].copy_(out)


def overflowing(x: torch.Tensor, out: torch.Tensor) -> None:
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    out.copy_(gate * gate.exp() / (1 + gate.exp()) * up)


def truncating(x: torch.Tensor, out: torch.Tensor) -> None:
    exact = torch.empty(out.shape)
    silu(x.to(torch.float32), exact)
    out.copy_((exact.view(torch.int32) & ~0xFFFF).view(torch.float32) if out.dtype == torch.bfloat16 else exact)


@pytest.mark.parametrize(("entry", "words"), [
    (one_percent_more, "NMSE"),
    (one_row_less, "elements are NaN, or should be"),
    (one_column_more, "elements around it were written"),
    (one_row_more, "elements around it were written"),
    (packed_output, "strided rows: out"),
    (packed_input, "strided rows: out"),
    (changed_input, "x: it is an input and was changed"),
    (overflowing, "elements are NaN, or should be"),
    (truncating, "NMSE"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_kernel_is_caught(entry: Entry, words: str, acme: Acme) -> None:
    kernel = acme.kernel("silu_mul", entry)
    assert words in agree(acme.bench(kernel), kernel)


def test_a_kernel_that_raises_is_caught(acme: Acme) -> None:
    def only_fp32(x: torch.Tensor, out: torch.Tensor) -> None:
        if x.dtype != torch.float32:
            raise TypeError(f"{x.dtype}")
        silu(x, out)

    narrow = acme.kernel("silu_mul", only_fp32, equals("dtype", "fp32"))
    assert agree(acme.bench(narrow), narrow) == ""
    wide = acme.kernel("silu_mul", only_fp32, is_in("dtype", ("fp32", "bf16")))
    with pytest.raises(TypeError, match="bfloat16"):
        agree(acme.bench(wide), wide)


def test_an_error_that_int8_activations_do_not_explain_is_caught(acme: Acme) -> None:
    def linear(x: torch.Tensor, weight: Dense | GroupAffine, out: torch.Tensor) -> None:
        scale = x.to(torch.float32).abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        rounded = (x.to(torch.float32) / scale).round() * scale
        out.copy_(rounded @ weight.dequantize(torch.float32).T * factor)

    factor = 1.0
    kernel = acme.kernel("linear", linear, equals("activations", "int8"))
    bench = acme.bench(kernel)
    assert agree(bench, kernel, "ga4-g32") == ""
    factor = 1.01
    assert "NMSE" in agree(bench, kernel, "ga4-g32-min-fp16/n17-fp32")


def test_a_condition_that_is_too_wide_for_the_offsets_is_caught(acme: Acme) -> None:
    def no_zero_points(x: torch.Tensor, weight: GroupAffine, out: torch.Tensor) -> None:
        scale, bias = weight.scale_and_bias()
        if weight.spec.offset == "zero_points":
            bias = -scale * 2 ** (weight.spec.bits - 1)
        values = weight.codes.view(weight.shape[0], scale.shape[1], -1) * scale.unsqueeze(-1) + bias.unsqueeze(-1)
        out.copy_(x.to(torch.float32) @ values.flatten(1).T)

    affine = equals("weight.family", "group_affine")
    kernel = acme.kernel("linear", no_zero_points, affine & is_in("weight.offset", ("constant", "minimums")))
    assert agree(acme.bench(kernel), kernel, "ga3-") == ""
    kernel = acme.kernel("linear", no_zero_points, affine)
    assert "NMSE" in agree(acme.bench(kernel), kernel, "ga3-")


def test_a_kernel_or_prepare_that_changes_the_weight_is_caught(acme: Acme) -> None:
    def linear(x: torch.Tensor, weight: Dense, out: torch.Tensor) -> None:
        reference("linear")(x, weight, out)
        weight.values.mul_(2)

    def prepare(weight: Dense) -> Dense:
        kept = Dense(weight.values.clone())
        weight.values.zero_()
        return kept

    dense = equals("weight.family", "dense")
    kernel = acme.kernel("linear", linear, dense)
    assert "the weight's values were changed" in agree(acme.bench(kernel), kernel, "dense-fp32")
    kernel = acme.kernel("linear", reference("linear"), dense, prepare)
    assert "prepare\n  the weight's values were changed" in agree(acme.bench(kernel), kernel, "dense-fp32")


def test_ids_outside_the_table_must_give_nan(acme: Acme) -> None:
    def clamped(ids: torch.Tensor, weight: Dense, out: torch.Tensor) -> None:
        reference("embedding")(ids.clamp(0, weight.shape[0] - 1), weight, out)

    kernel = acme.kernel("embedding", clamped, equals("weight.family", "dense"))
    assert "wanted nan" in agree(acme.bench(kernel), kernel)


@pytest.mark.parametrize("part", ["residual", "in-place"])
def test_forms_of_rms_norm_are_held_apart(part: str, acme: Acme) -> None:
    def forgetful(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        if part == "residual" and residual is not None:
            reference("rms_norm")(x + residual, weight, eps, out)  # right, but the residual is not kept
        elif part == "in-place":
            out.zero_()  # as a kernel does that writes before it has read
            reference("rms_norm")(x, weight, eps, out, residual)
        else:
            reference("rms_norm")(x, weight, eps, out, residual)

    kernel = acme.kernel("rms_norm", forgetful)
    bench = acme.bench(kernel)
    assert "NMSE" in agree(bench, kernel, part)
    wrong = {case.name for case in some_cases(bench, kernel) if list(failures(lambda case: check_agrees(bench, kernel, case), [case]))}
    assert wrong
    assert all(part in name for name in wrong)


def test_what_lies_beyond_the_rotary_size_stays(acme: Acme) -> None:
    def rounding(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        reference("rotary")(q, k, positions, cos_sin)
        q[..., cos_sin.shape[1] :] *= 1.0000001

    kernel = acme.kernel("rotary", rounding)
    bench = acme.bench(kernel)
    assert "is not to be written" in agree(bench, kernel, "d40-r32/n17-fp32")
    assert agree(bench, kernel, "d64-r64") == ""


# ---- Sampling ---------------------------------------------------------------------------------------------------------------


def sample_last_of_ties(logits: torch.Tensor, *rest: torch.Tensor) -> None:
    reference("sample")(logits, *rest)
    for i in range(logits.shape[0]):
        if rest[0][i] == 0 and rest[-1][i] >= 0:
            rest[-1][i] = int((logits[i] == logits[i].max()).nonzero()[-1])


def sample_without_top_k(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, *rest: torch.Tensor) -> None:
    reference("sample")(logits, temperature, torch.zeros_like(top_k), *rest)


def sample_in_another_order(logits: torch.Tensor, *rest: torch.Tensor) -> None:
    reference("sample")(logits.flip(-1), *rest)
    rest[-1].copy_(torch.where(rest[-1] >= 0, logits.shape[1] - 1 - rest[-1], rest[-1]))


def sample_nan_as_zero(logits: torch.Tensor, *rest: torch.Tensor) -> None:
    reference("sample")(logits.nan_to_num(nan=0.0, neginf=-torch.inf), *rest)


def sample_at_half_the_temperature(logits: torch.Tensor, temperature: torch.Tensor, *rest: torch.Tensor) -> None:
    reference("sample")(logits, temperature / 2, *rest)


@pytest.mark.parametrize(("entry", "part"), [
    (sample_last_of_ties, "ties"), (sample_without_top_k, "grid-top-k-v50"), (sample_in_another_order, "grid-plain-v50"),
    (sample_nan_as_zero, "no-answer"), (sample_at_half_the_temperature, "grid-plain-v50"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_sampler_is_caught(entry: Entry, part: str, acme: Acme) -> None:
    kernel = acme.kernel("sample", entry)
    assert "tokens are wrong" in agree(acme.bench(kernel), kernel, part)


# ---- The cache --------------------------------------------------------------------------------------------------------------


def heads_first(cache: torch.Tensor) -> torch.Tensor:
    """The memory of a cache ``[block, slot, head, dim]`` taken for one of ``[block, head, slot, dim]``, seen in the right order."""
    blocks, slots, heads, dim = cache.shape
    return cache.view(blocks, heads, slots, dim).transpose(1, 2)


def write_heads_first(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    for values, cache in ((k, heads_first(k_cache)), (v, heads_first(v_cache))):
        inside = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
        where = slots[inside].long()
        cache[where // cache.shape[1], where % cache.shape[1]] = values[inside].to(cache.dtype)


def attention_heads_first(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any) -> None:
    reference("paged_attention")(q, heads_first(k_cache), heads_first(v_cache), *rest)


def test_an_order_that_is_not_the_declared_one_is_caught(acme: Acme) -> None:
    write, attention = acme.kernel("write_kv", write_heads_first), acme.kernel("paged_attention", attention_heads_first)
    bench = acme.bench(write, attention)
    assert "k_cache" in agree(bench, write, "h3-d64/n17-fp32-kv-fp32")
    assert "elements are NaN, or should be" in agree(bench, attention, "decode-h9-3-d64/fp32-kv-fp32")


@pytest.mark.parametrize("order", [("block", "head", "slot", "dim"), ("head", "block", "dim", "slot")], ids="-".join)
def test_any_declared_order_is_served(order: tuple[str, ...], acme: Acme) -> None:
    def canonical(cache: torch.Tensor) -> torch.Tensor:
        return cache.permute([order.index(axis) for axis in SLOTS_FIRST])

    def write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
        for values, cache in ((k, canonical(k_cache)), (v, canonical(v_cache))):
            for i, slot in enumerate(slots.tolist()):
                if 0 <= slot < cache.shape[0] * cache.shape[1]:
                    cache[slot // cache.shape[1], slot % cache.shape[1]] = values[i].to(cache.dtype)

    def attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any) -> None:
        reference("paged_attention")(q, canonical(k_cache), canonical(v_cache), *rest)

    kernels = acme.kernel("write_kv", write_kv), acme.kernel("paged_attention", attention)
    bench = acme.bench(*kernels, layout=KVLayout("acme", 16, order, order, ("fp32", "bf16")))
    assert agree(bench, kernels[0], "n17") == ""
    assert agree(bench, kernels[1], "mixed-h9-3-d64/fp32") == ""
    check_reads_back(bench, *kernels, next(round_trips(bench.platform.kv_layout)))


def write_from_the_end(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As an index of -1 means in Python."""
    reference("write_kv")(k, v, k_cache, v_cache, torch.where(slots == -1, k_cache.shape[0] * k_cache.shape[1] - 1, slots))


def test_slots_that_are_none_must_not_be_written(acme: Acme) -> None:
    kernel = acme.kernel("write_kv", write_from_the_end)
    assert "is not to be written" in agree(acme.bench(kernel), kernel)


def attention_to_the_future(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                            cu_query_lens: torch.Tensor, seq_lens: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Every query sees all of its sequence."""
    for s, length in enumerate(seq_lens.tolist()):
        for row in range(int(cu_query_lens[s]), int(cu_query_lens[s + 1])):
            one = slice(row, row + 1)
            reference("paged_attention")(q[one], k_cache, v_cache, block_table[s : s + 1], torch.tensor([0, 1]),
                                         torch.tensor([length]), scale, out[one])


def attention_to_the_whole_last_block(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                                      cu_query_lens: torch.Tensor, seq_lens: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Slots past the length have a weight of 0, and what they hold is multiplied with it."""
    reference("paged_attention")(q, k_cache, v_cache, block_table, cu_query_lens, seq_lens, scale, out)
    for s, length in enumerate(seq_lens.tolist()):
        if length:
            block = v_cache[int(block_table[s, (length - 1) // v_cache.shape[1]])]
            out[int(cu_query_lens[s]) : int(cu_query_lens[s + 1])] += 0 * block.sum()


def attention_of_65536_tokens(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                              cu_query_lens: torch.Tensor, seq_lens: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Positions are 16 bits wide."""
    first = torch.where(seq_lens > 65536, seq_lens % 65536, seq_lens).to(torch.int32)
    reference("paged_attention")(q, k_cache, v_cache, block_table, cu_query_lens, first, scale, out)


@pytest.mark.parametrize(("entry", "part"), [
    (attention_to_the_future, "prefill-h9-3-d64/fp32-kv-fp32"), (attention_to_the_whole_last_block, "decode-one-h9-3-d64/fp32-kv-fp32"),
    (attention_of_65536_tokens, "needle-131079-h4-1-d64/bf16"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_broken_attention_is_caught(entry: Entry, part: str, acme: Acme) -> None:
    kernel = acme.kernel("paged_attention", entry)
    assert "out: " in agree(acme.bench(kernel), kernel, part)


def test_what_one_kernel_writes_another_must_read(acme: Acme) -> None:
    write, attention = acme.kernel("write_kv", reference("write_kv")), acme.kernel("paged_attention", reference("paged_attention"))
    other = acme.kernel("paged_attention", attention_heads_first)
    bench = acme.bench(write, attention, other)
    for trip in round_trips(LAYOUT):
        check_reads_back(bench, write, attention, trip)
    with pytest.raises(Nonconformance, match="step 0: out"):
        check_reads_back(bench, write, other, next(round_trips(LAYOUT)))


# ---- Capture ----------------------------------------------------------------------------------------------------------------


class Recorded(Graph):
    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay  # type: ignore[method-assign]

    def replay(self) -> None:
        raise NotImplementedError


class NothingCaptured(GraphCapture):
    """Runs the step, and replays nothing."""

    def capture(self, step: Callable[[], None]) -> Graph:
        step()
        return Recorded(lambda: None)


def test_a_graph_that_replays_nothing_is_caught(acme: Acme) -> None:
    kernel = acme.kernel("silu_mul", silu)
    bench = acme.bench(kernel, capture=NothingCaptured)
    found = "".join(failures(lambda case: check_captured(bench, kernel, case), some_cases(bench, kernel, "n2x33-fp32")))
    assert "replay, changed inputs: out: 66 of 66 elements are not the eager call's" in found


def test_a_kernel_that_keeps_what_its_inputs_were_is_caught(acme: Acme) -> None:
    seen: dict[int, torch.Tensor] = {}

    def keeps(x: torch.Tensor, out: torch.Tensor) -> None:
        """As a graph does into which a host value was baked."""
        silu(seen.setdefault(x.data_ptr(), x.clone()), out)

    kernel = acme.kernel("silu_mul", keeps)
    bench = acme.bench(kernel)
    case = some_cases(bench, kernel, "n17x33-fp32")[0]
    with pytest.raises(Nonconformance, match="replay, changed inputs"):
        check_captured(bench, kernel, case)


def test_a_step_is_captured_with_what_was_written_in_it(acme: Acme) -> None:
    write, attention = acme.kernel("write_kv", reference("write_kv")), acme.kernel("paged_attention", reference("paged_attention"))
    bench = acme.bench(write, attention, capture=NothingCaptured)
    with pytest.raises(Nonconformance, match="step 2, replayed: out"):
        check_reads_back(bench, write, attention, next(round_trips(LAYOUT)))


def test_a_kernel_is_captured_no_further_than_it_says(acme: Acme) -> None:
    def safe_for(safety: GraphSafety) -> set[str]:
        kernel = Kernel("paged_attention", "acme.attention", "fitment.ops.paged_attention:reference", graph_safe=safety)
        bench = acme.bench(kernel)
        return {case.name.partition("-h")[0] for case in cases("paged_attention", LAYOUT) if bench.can_capture(kernel, case)}

    assert safe_for(GraphSafety.NEVER) == set()
    assert "decode" in safe_for(GraphSafety.SINGLE_TOKEN)
    assert safe_for(GraphSafety.UNIFORM_BATCH) - safe_for(GraphSafety.SINGLE_TOKEN) == {"verify"}
    assert safe_for(GraphSafety.ALWAYS) - safe_for(GraphSafety.UNIFORM_BATCH) >= {"prefill", "chunk", "mixed"}


# ---- Refusals, sources, the session -----------------------------------------------------------------------------------------


class Unwritten(Condition):
    """A condition that is code: written as data it admits everything."""

    def check(self, facts: Any, registry: Any) -> Any:
        return equals("dtype", "fp32").check(facts, registry)

    def keys(self) -> frozenset[str]:
        return frozenset(("dtype",))

    def to_json(self) -> dict[str, Any]:
        return {"all_of": []}


def test_a_condition_that_is_not_data_is_caught(acme: Acme) -> None:
    kernel = acme.kernel("silu_mul", silu, equals("dtype", "fp32") & equals("arch", "acme_1"))
    check_refuses(acme.bench(kernel), kernel, cases("silu_mul", LAYOUT))
    kernel = acme.kernel("silu_mul", silu, Unwritten())
    with pytest.raises(Nonconformance, match="n1x1-bf16: the condition says something else"):
        check_refuses(acme.bench(kernel), kernel, cases("silu_mul", LAYOUT))


def test_sources_that_are_not_there_are_named() -> None:
    kernel = Kernel("silu_mul", "acme.silu_mul", "fitment.ops.silu_mul:reference", sources=("ops/silu_mul.py", "ops/silu_mul.cu"))
    with pytest.raises(Nonconformance, match=r"'ops/silu_mul.cu' is not a file of the package 'fitment'"):
        check_sources(kernel)
    assert sources_digest(kernel) is None
    assert sources_digest(Kernel("silu_mul", "acme.silu_mul", "fitment.ops.silu_mul:reference")) is None


def test_the_digest_is_of_names_and_contents_in_sorted_order() -> None:
    names = ("ops/silu_mul.py", "ops/linear.py")
    kernel = Kernel("silu_mul", "acme.silu_mul", "fitment.ops.silu_mul:reference", sources=names)
    package = Path(fitment.__file__).parent
    content = b"".join(name.encode() + b"\0" + (package / name).read_bytes() + b"\0" for name in sorted(names))
    assert sources_digest(kernel) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(("arguments", "words"), [
    ((None, None, []), r"--platform NAME says whose kernels to check; installed: .*null"),
    (("acme", None, []), r"--platform acme: no such platform; installed: .*null"),
    (("broken", None, []), r"--platform broken: its plugin is broken, at import: ModuleNotFoundError"),
    (("null", "null:1", []), r"--device null:1: no such device; null lists null:0"),
    (("null", None, ["null.fast"]), r"--kernel null.fast: no such kernel; null registers null.reference.embedding, "),
], ids=["missing", "unknown", "broken", "device", "kernel"])
def test_usage_errors_list_what_there_is(arguments: tuple[Any, Any, list[str]], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITMENT_PLUGINS", "null=fitment.null.plugin,broken=no_such_module_anywhere")
    with pytest.raises(FitmentError, match=words):
        open_session(*arguments)


def test_evidence_is_of_kernels_that_passed_all_of_their_tests() -> None:
    kernel = Kernel("silu_mul", "k", "fitment.ops.silu_mul:reference", sources=("ops/silu_mul.py",))
    tally = _evidence.Tally()
    tally.collected["k"], tally.ended["k"] = 3, 2
    assert tally.lacks(kernel) == "it was not executed"
    tally.executed.add("k")
    assert tally.lacks(kernel) == "1 of 3 tests were not run"
    tally.ended["k"] = 3
    assert tally.lacks(kernel) == ""
    tally.failed["k"] = 1
    assert tally.lacks(kernel) == "1 failed"


@pytest.mark.parametrize(("got", "want", "tolerance", "words"), [
    ([1.0, 2.0], [1.0, 2.0], 0.0, ""),
    ([1.0, 2.0], [1.0, 2.0000001], 0.0, "NMSE"),
    ([0.0, 0.0], [0.0, 0.0], 1e-6, ""),
    ([0.0, 1e-9], [0.0, 0.0], 1e-6, "NMSE inf"),
    ([torch.nan, 2.0], [1.0, 2.0], 1e-6, "1 of 2 elements are NaN, or should be; the first, [0], is nan, wanted 1"),
    ([torch.inf, 2.0], [1.0, 2.0], 1e-6, "NMSE inf"),
    ([1.0] * 9999 + [1.05], [1.0] * 10000, 1e-6, "1 elements are far off; the first, [9999], is 1.05, wanted 1"),
    ([1.01] * 100, [1.0] * 100, 1e-4 / 1.2 * 1.001, ""),
    ([1.01] * 100, [1.0] * 100, 1e-4 / 1.2 * 0.999, "NMSE 1.00e-04 is above 1.0e-04; the worst element, [0], is 1.01, wanted 1"),
])
def test_differences(got: list[float], want: list[float], tolerance: float, words: str) -> None:
    found = difference(torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64), tolerance)
    assert found.startswith(words) if words else found == ""


# ---- The command ------------------------------------------------------------------------------------------------------------


def run_kit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "fitment.conformance", *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, "FITMENT_PLUGINS": "null=fitment.null.plugin"},
                          capture_output=True, text=True, timeout=250, check=False)


def test_the_null_platform_passes_from_an_empty_folder(tmp_path: Path) -> None:
    result = run_kit(tmp_path, "--platform", "null", "--evidence", "null.json", "-q")
    assert result.returncode == 0, result.stdout
    assert "evidence for 8 of 8 kernels: null.json" in result.stdout
    evidence = json.loads((tmp_path / "null.json").read_text())
    assert {evidence["platform"], evidence["hardware"]} == {"null"}
    assert evidence["device"] == "a fake device on torch's reference ops"
    assert evidence["versions"].keys() == {"fitment", "torch", "python"}
    assert evidence["kernels"].keys() == {f"null.reference.{op}" for op in OPS}
    source = b"ops/silu_mul.py\0" + (Path(fitment.__file__).parent / "ops" / "silu_mul.py").read_bytes() + b"\0"
    tests = len(cases("silu_mul", LAYOUT)) + len(("sources", "refuses"))
    assert evidence["kernels"]["null.reference.silu_mul"] == {
        "op": "silu_mul", "digest": hashlib.sha256(source).hexdigest(), "passed": tests, "failed": 0, "level": "executed"}
    assert [path.name for path in tmp_path.iterdir()] == ["null.json"]


def test_a_run_that_leaves_tests_out_gives_no_evidence(tmp_path: Path) -> None:
    result = run_kit(tmp_path, "--platform", "null", "--kernel", "null.reference.silu_mul", "--evidence", "null.json", "-k", "n1x1-fp32")
    assert result.returncode == 0, result.stdout
    assert "conformance of null on null:0 (null, a fake device on torch's reference ops)" in result.stdout
    assert "none for null.reference.silu_mul: " in result.stdout
    assert not (tmp_path / "null.json").exists()


def test_without_a_platform_the_command_is_a_usage_error(tmp_path: Path) -> None:
    result = run_kit(tmp_path)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--platform NAME says whose kernels to check; installed: " in result.stderr
