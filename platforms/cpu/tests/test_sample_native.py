"""sample at every level that runs here, against the op's reference in float64 and against counted frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fitment.ops.sample import reference

native = pytest.importorskip("fitment_cpu._native", reason="fitment-cpu was installed without its extension")

from fitment_cpu.kernels.sample import sample  # noqa: E402

NEAR = 1e-6
"""How near to a boundary of the running sum, or of top-p and min-p, a token may differ from the reference's."""


pytestmark = pytest.mark.usefixtures("level")

Parameters = dict[str, torch.Tensor]


def parameters(
    n: int,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    uniform: float | torch.Tensor = 0.5,
) -> Parameters:
    """The op's vectors for n rows, from vectors or from one value for all."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "uniform": uniform}
    types = {"top_k": torch.int32}
    return {name: torch.as_tensor(value).to(types.get(name, torch.float32)).expand(n).contiguous() for name, value in given.items()}


def drawn(logits: torch.Tensor, chosen: Parameters, threads: int = 1) -> list[int]:
    native.set_num_threads(threads)
    out = torch.full((len(logits),), -7, dtype=torch.int32)
    sample(logits, **chosen, out=out)
    return out.tolist()


def referred(logits: torch.Tensor, chosen: Parameters) -> list[int]:
    out = torch.full((len(logits),), -7, dtype=torch.int32)
    reference(logits, **chosen, out=out)
    return out.tolist()


def assert_as_reference(logits: torch.Tensor, chosen: Parameters) -> None:
    """Row by row the reference's token, or what it would be a hair's breadth from a boundary; few rows may be so near."""
    got, want = drawn(logits, chosen), referred(logits, chosen)
    wrong = [i for i, (mine, theirs) in enumerate(zip(got, want, strict=True)) if mine != theirs]
    assert len(wrong) <= 1 + len(logits) // 100
    for i in wrong:
        row = {name: value[i : i + 1] for name, value in chosen.items()}
        near = set()
        for step in (-NEAR, 0.0, NEAR):
            for tip in (-NEAR, 0.0, NEAR):
                uniform, top_p = (row["uniform"] + step).clamp(0, 1 - 2**-24), row["top_p"] + tip
                min_p = row["min_p"] * (1 + tip)
                near.add(referred(logits[i : i + 1], row | {"uniform": uniform, "top_p": top_p, "min_p": min_p})[0])
        assert got[i] in near, (i, row)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab=st.sampled_from((1, 2, 7, 63, 64, 65, 130, 1000, 5003)),
    spread=st.just(0.0) | st.floats(0.001, 12),
    grid=st.sampled_from((0, 1, 4)),
    holes=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_as_the_reference(vocab: int, spread: float, grid: int, holes: bool, seed: int) -> None:
    n = 24
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(n, generator=generator)

    logits = torch.randn(n, vocab, generator=generator) * spread
    if grid:
        logits = (logits * grid).round() / grid  # ties
    if holes:
        logits[torch.rand(n, vocab, generator=generator) < 0.3] = -math.inf
        logits[:, seed % vocab] = 0.25
    on = [uniform() < 0.5 for _ in range(5)]
    chosen = parameters(
        n,
        temperature=torch.where(uniform() < 0.1, 0.0, 0.05 + 2 * uniform()),
        top_k=torch.where(on[0], torch.where(on[1], (uniform() * 20).int() + 1, (uniform() * vocab * 1.3).int()), 0),
        top_p=torch.where(on[2], 0.001 + 0.998 * uniform(), 1.0),
        min_p=torch.where(on[3], uniform() * 0.5, 0.0),
        uniform=uniform(),
    )
    assert_as_reference(logits, chosen)


@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_k": 5000}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 700, "top_p": 0.8}])
def test_a_real_vocabulary(spread: float, filters: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(5)
    n, vocab = 2, 49_152
    buffer = torch.randn(n, vocab + 9, generator=generator) * spread
    assert_as_reference(buffer[:, 3 : 3 + vocab], parameters(n, uniform=torch.rand(n, generator=generator), **filters))  # type: ignore[arg-type]


@pytest.mark.parametrize("filters", [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.8, "min_p": 0.1}])
def test_frequencies_are_the_probabilities(filters: dict[str, float]) -> None:
    """Uniform numbers on a grid: each token falls as often as its probability says, to within one."""
    generator = torch.Generator().manual_seed(6)
    vocab, draws = 70, 4000
    row = torch.randn(vocab, generator=generator) * 1.5
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    got = drawn(row.expand(draws, vocab).contiguous(), parameters(draws, 0.8, uniform=uniform, **filters))  # type: ignore[arg-type]
    probs = (row.double() / torch.tensor(0.8).double()).softmax(-1)
    ranked = sorted(range(vocab), key=lambda i: -float(probs[i]))
    kept = ranked[: int(filters.get("top_k", vocab))]
    total = sum(float(probs[i]) for i in kept)
    if "top_p" in filters:
        running = 0.0
        for size, i in enumerate(kept, 1):
            running += float(probs[i]) / total
            if running >= filters["top_p"]:
                kept = kept[:size]
                break
    kept = [i for i in kept if probs[i] >= filters.get("min_p", 0) * probs[ranked[0]]]
    total = sum(float(probs[i]) for i in kept)
    assert got == sorted(got)
    for i in range(vocab):
        share = float(probs[i]) / total * draws if i in kept else 0.0
        assert abs(got.count(i) - share) <= 1


@pytest.mark.parametrize("vocab", [1, 15, 64, 1000, 49_157])
def test_greedy_takes_the_first_of_the_greatest(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator)
    logits[1] = 0.0
    logits[2] = -3.0
    logits[2, vocab // 2 :] = 7.0
    logits[3, vocab - 1] = 50.0
    logits[4] = -math.inf
    logits[4, vocab // 3] = -1e30
    assert drawn(logits, parameters(6, temperature=0.0)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_have_no_token(temperature: float) -> None:
    logits = torch.zeros(6, 130)
    logits[0, 129] = math.nan
    logits[1, 0] = math.nan
    logits[2] = -math.inf
    logits[3, 64] = math.inf
    logits[4, :-1] = -math.inf
    got = drawn(logits, parameters(6, temperature, uniform=0.0))
    assert got == [-1, -1, -1, -1, 129, 0]


def test_parameters_out_of_range_harm_nobody() -> None:
    logits = torch.arange(100.0).expand(9, 100).contiguous() / 10
    chosen = parameters(
        9,
        temperature=torch.tensor([-1.0, math.nan, math.inf, 1e-40, 1e30, 1, 1, 1, 1]),
        top_k=torch.tensor([0, 0, 0, 0, 0, -5, 2**31 - 1, 3, 3]),
        top_p=torch.tensor([1, 1, 1, 1, 1, 1.5, -1, math.nan, 0]),
        min_p=torch.tensor([0, 0, 0, 0, 0, -1, 0, 7, math.nan]),
        uniform=torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 1.0, math.nan, -1, 2]),
    )
    got = drawn(logits, chosen)
    assert got[:4] == [-1, -1, -1, 99]
    assert 45 <= got[4] <= 55
    assert got[5:] == [99, 99, 99, 99]


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(8)
    n, vocab = 23, 3001
    logits = torch.randn(n, vocab, generator=generator) * 2
    chosen = parameters(
        n, 0.9, torch.arange(n) * 9, 0.5 + torch.rand(n, generator=generator), 0.01, torch.rand(n, generator=generator)
    )
    want = drawn(logits, chosen)
    assert drawn(logits, chosen, threads=4) == want
    for i in range(n):
        row = {name: value[i : i + 1] for name, value in chosen.items()}
        assert drawn(logits[i : i + 1], row) == [want[i]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros(2, 8, dtype=torch.bfloat16)),
        ("logits", torch.zeros(8)),
        ("temperature", torch.zeros(3)),
        ("top_k", torch.zeros(2, dtype=torch.int64)),
        ("top_p", torch.zeros(2, dtype=torch.float64)),
        ("min_p", torch.zeros(2, 1)),
        ("uniform", torch.zeros(4)[::2]),
        ("out", torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_what_the_contract_forbids_is_refused(name: str, value: torch.Tensor) -> None:
    given = {"logits": torch.zeros(2, 8), **parameters(2), "out": torch.zeros(2, dtype=torch.int32)}
    sample(**given)
    with pytest.raises(ValueError, match=rf"^{name} is torch\.\w+ \[.*wanted"):
        sample(**given | {name: value})
