"""How a model would run: the kernel for each op and what stood against the others, the cache, memory, and what was chosen."""

from __future__ import annotations

import argparse

from fitment.kernels import Verdict
from fitment.plugins import load
from fitment_matrix._memory import gib
from fitment_matrix._plan import Binding
from fitment_matrix.cli import _request
from fitment_matrix.cli._common import dump, show
from fitment_matrix.cli.check import name_of, refuse
from fitment_matrix.gate import Plan, Unfit, describe

add_arguments = _request.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or the refusal."""
    decision = _request.decided(arguments, load())
    if isinstance(decision, Unfit):
        return refuse(decision, arguments.json)
    if arguments.json:
        dump({**decision.to_json(), "digest": decision.digest})
    else:
        _print(decision)
    return 0


def _print(plan: Plan) -> None:
    print(f"{name_of(plan.request)} on {describe(plan.place)}: plan {plan.digest}\n")
    memory, layout = plan.memory, plan.kv_layout
    graphs = " ".join(map(str, plan.graph_batch_sizes))
    usable = "unknown" if memory.usable is None else gib(memory.usable)
    show([
        ("weights", f"{plan.request.format}: {'; '.join(plan.weights())}"),
        ("dtypes", f"{plan.dtype}; linear layers see {plan.activations}; cache {plan.kv_dtype}"),
        ("tokens", f"{plan.max_model_len} a sequence, {plan.max_num_seqs} sequences, {plan.max_batch_tokens} a step"),
        ("cache", f"layout {layout.name}, {plan.num_blocks} blocks of {layout.block_size} tokens"),
        ("memory", f"weights {gib(memory.weights)} + cache {gib(memory.cache)} + work {gib(memory.work)} = {gib(memory.total)}; "
                   f"usable {usable}"),
        ("graphs", f"decode steps of {graphs} sequences" if graphs else "none"),
        ("features", ", ".join(plan.features) or "none insisted on"),
    ])
    print()
    show([(binding.need.label, binding.kernel.name, binding.kernel.speed.name.lower()) for binding in plan.bindings],
         ("op", "kernel", "speed"))
    passed = [row for binding in plan.bindings for row in _passed_by(binding)]
    if passed:
        print("\nPassed by")
        show(list(dict.fromkeys(passed)))
    print("\nChosen by the plan itself")
    show([(choice,) for choice in plan.choices])


def _passed_by(binding: Binding) -> list[tuple[str, str, str]]:
    return [passed_row(verdict) for verdict in binding.selection.trace if verdict.kernel is not binding.kernel]


def passed_row(verdict: Verdict) -> tuple[str, str, str]:
    """A kernel that was not chosen: its name, the first reason's code, and the reason in words."""
    if verdict.is_admitted:
        return verdict.kernel.name, "", f"would serve, {verdict.kernel.speed.name.lower()}, after the chosen one"
    first, more = verdict.reasons[0], len(verdict.reasons) - 1
    return verdict.kernel.name, first.code, first.sentence() + (f" (and {more} more)" if more else "")
