"""What can be said against a request without its kernels: the model, the format, the numbers, the features."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from fitment.conditions import Reason, reason_code
from fitment.facts import Kind
from fitment.features import FEATURES, Feature, conflicts
from fitment.formats import formats
from fitment.weights.specs import DENSE_DTYPES, ITEMSIZE
from fitment_matrix._request import DEFAULTS, FLAGS, OPEN, Request
from fitment_matrix._site import Site


def _asked(key: str, wanted: str, found: object, remedy: str | None = None) -> Reason:
    """A reason about what was asked; the remedy is the option that asks for it."""
    remedy = FLAGS.get(key, "") if remedy is None else remedy
    return Reason(reason_code(Kind.REQUEST, key), Kind.REQUEST, key, wanted, str(found), remedy)


def model_reasons(request: Request, site: Site) -> Iterator[Reason]:
    """What of the model the engine does not have, nobody describes, or the format does not read."""
    model, engine = request.model, site.engine
    if engine is not None:
        other = f"an engine that has it; this is {engine.name} {engine.version}"
        if model.architecture not in engine.architectures:
            yield _asked("architecture", f"architecture in {' '.join(sorted(engine.architectures))}", model.architecture, other)
        if model.rope_scaling is not None and model.rope_scaling.kind not in engine.rope_scalings:
            known = " ".join(sorted(engine.rope_scalings)) or "none"
            yield _asked("rope_scaling", f"rope_scaling in {known}", model.rope_scaling.kind, other)
    for item in model.unserved:
        yield _asked("model", f"a model without {item}", "with it", "a model that does not ask for it")
    for encoding, names in site.inventory(request).unserved.items():
        fmt = formats().get(request.format)
        known = f"tensors in {' '.join(fmt.specs)}" if fmt else "tensors that its format reads"
        found = f"{encoding} in {len(names)} of them, first {names[0]}"
        yield _asked("format", known, found, "convert it to one of these")


def number_reasons(request: Request) -> Iterator[Reason]:
    """Numbers that are none or not positive, and a context that the model cannot see."""
    for name in DEFAULTS:
        value = getattr(request, name)
        if not is_positive(value) and not (value is None and DEFAULTS[name] is None):
            yield _asked(name, f"{name} a whole number of at least 1", repr(value))
    length, window = request.max_model_len, request.model.sliding_window
    if length is not None and is_positive(length):
        if length > request.longest():
            yield _asked("max_model_len", f"max_model_len at most {request.longest()}, for which the model was made", length)
        if window is not None and length > window:
            yield Reason("FIT-REQ-SLIDING-WINDOW", Kind.REQUEST, "max_model_len",
                         f"max_model_len at most {window}, the model's sliding window, which no kernel applies", str(length),
                         FLAGS["max_model_len"])


def is_positive(value: object) -> bool:
    """Whether an option is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def dtype_reasons(request: Request, site: Site) -> dict[str, Reason]:
    """Options in ``OPEN`` whose value is no element type that could serve, by option."""
    known = {"dtype": DENSE_DTYPES, "activations": tuple(ITEMSIZE), "kv_dtype": site.platform.kv_layout.dtypes}
    given = {name: value for name in OPEN if (value := getattr(request, name)) is not None}
    return {name: _asked(name, f"{name} in {' '.join(known[name])}", value)
            for name, value in given.items() if value not in known[name]}


def known_features(request: Request) -> tuple[Feature, ...]:
    """The features asked for that exist."""
    return tuple(FEATURES[name] for name in request.features if name in FEATURES)


def feature_reasons(request: Request, site: Site) -> Iterator[tuple[str, Reason]]:
    """What stands against each feature asked for, but for its ops: (feature, reason)."""
    engine = site.engine
    for name in request.features:
        if name not in FEATURES:
            near = get_close_matches(name, FEATURES, n=3)
            remedy = f"did you mean {' or '.join(near)}?" if near else ""
            yield name, _asked("feature", "a feature that exists (capabilities features lists them)", repr(name), remedy)
        elif engine is not None and name not in engine.features:
            yield name, Reason("FIT-ENV-ENGINE", Kind.ENVIRONMENT, "engine", f"an engine that has {name}",
                               f"{engine.name} {engine.version}, which has not")
    for feature in known_features(request):
        for reason in (reason for ability in feature.abilities for reason in site.lacks(ability)):
            yield feature.name, reason
    for sentence in conflicts(tuple(feature.name for feature in known_features(request))):
        yield "", Reason("FIT-REQ-CONFLICT", Kind.REQUEST, "features", "features that combine", sentence, FLAGS["features"])


def pinned(request: Request) -> tuple[dict[str, str], list[tuple[str, Reason]]]:
    """Values of ``OPEN`` that the operator gave, by option or by a feature that needs one, and the contradictions among them."""
    values = {name: str(value) for name in OPEN if (value := getattr(request, name)) is not None}
    wrong = []
    for feature in known_features(request):
        for name, value in ((name, str(need.facts[name])) for need in feature.needs for name in OPEN if name in need.facts):
            if values.setdefault(name, value) != value:
                reason = Reason("FIT-REQ-CONFLICT", Kind.REQUEST, name, f"{name} = {value}", values[name], FLAGS[name])
                wrong.append((feature.name, reason))
    return values, wrong
