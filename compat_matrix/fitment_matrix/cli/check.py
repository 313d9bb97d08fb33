"""Whether a model can run here, or on hardware by name, as asked; if not, every reason, and the nearest requests that would."""

from __future__ import annotations

import argparse
from typing import Any

from fitment.plugins import Registry, load
from fitment_matrix._request import Request
from fitment_matrix._site import Site
from fitment_matrix._trials import Choice, Trial
from fitment_matrix.cli import _request
from fitment_matrix.cli._common import dump, show
from fitment_matrix.gate import Plan, Unfit, describe
from fitment_matrix.generate import slowness

add_arguments = _request.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Answer; a refusal is a no."""
    registry = load()
    decision = _request.decided(arguments, registry)
    if isinstance(decision, Unfit):
        return refuse(decision, arguments.json)
    slow = slow_words(decision, registry)
    if arguments.json:
        dump({"answer": "yes", "where": decision.where, "summary": decision.summary(), "digest": decision.digest, "slow": slow,
              "plan": decision.to_json()})
    else:
        print(f"Yes. {describe(decision.place)} runs {name_of(decision.request)}: {decision.summary()}. Plan {decision.digest}")
        if slow:
            print()
            show([("slow", slow)])
    return 0


def name_of(request: Request) -> str:
    """The model's name, or its architecture where it has none."""
    return request.model.name or request.model.architecture


def slow_words(plan: Plan, registry: Registry) -> str:
    """Why the plan's linear layers are slow, and the remedy; "" where they are not."""
    trial = Trial(Choice(plan.dtype, plan.activations, plan.kv_dtype), tuple((b.need, b.selection) for b in plan.bindings))
    slow = slowness(Site(plan.place, registry), trial)
    return slow.sentence() if slow else ""


def refuse(unfit: Unfit, is_json: bool) -> int:
    """Print a refusal: the answer, the reasons, the way out."""
    if is_json:
        dump(refusal_json(unfit))
        return 1
    print(f"No. {unfit.headline()}\n")
    show(unfit.rows())
    if unfit.nearest:
        print("\nNearest that would run, best first")
        show([(near.options, near.sentence) for near in unfit.nearest])
    return 1


def refusal_json(unfit: Unfit) -> dict[str, Any]:
    """A refusal as JSON holds it."""
    sentences = dict(zip(unfit.reasons, (sentence for _, sentence in unfit.rows()), strict=True))
    return {"answer": "no", "where": unfit.place, "headline": unfit.headline(),
            "reasons": [{**reason.to_json(), "against": list(unfit.subjects[reason]), "sentence": sentences[reason]}
                        for reason in unfit.reasons],
            "nearest": [{"options": near.options, "sentence": near.sentence, "where": near.place} for near in unfit.nearest]}
