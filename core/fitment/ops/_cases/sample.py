"""Cases of ``sample``: greedy rows, ties, rows that have no answer, every filter, and a distribution traced by a grid of uniforms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fitment.facts import Facts
from fitment.hardware import KVLayout
from fitment.ops._cases._case import Arg, Call, Case, Expected, Role, tensor
from fitment.ops._cases._data import Draw

NEAR = 2e-5
"""How far fp32 sums may move the edge between two tokens."""

Row = tuple[float, int, float, float]
"""Temperature, top_k, top_p, min_p."""

GREEDY: Row = (0.0, 0, 1.0, 0.0)
ROWS: tuple[Row, ...] = (
    GREEDY, (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.3, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.2), (0.8, 40, 0.9, 0.05),
    (1.0, 10**6, 1.0, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 0, 1.0, 1.0), (0.01, 0, 1.0, 0.0), (50.0, 3, 1.0, 0.0), (0.0, 3, 0.5, 0.5),
)
"""Parameters that the rows of a call take in turn; top_p and min_p are moved away from the edges between tokens."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens that each row may give."""

    allowed: Sequence[frozenset[int]]

    def problem(self, got: torch.Tensor, before: torch.Tensor) -> str:
        wrong = [(i, token) for i, (token, allowed) in enumerate(zip(got.tolist(), self.allowed, strict=True)) if token not in allowed]
        if not wrong:
            return ""
        i, token = wrong[0]
        return f"{len(wrong)} of {len(self.allowed)} tokens are wrong; the first, of row {i}, is {token}, wanted " \
               f"{' or '.join(map(str, sorted(self.allowed[i])))}"


def cases(layout: KVLayout) -> Iterator[Case]:
    """Row counts and vocabularies; then what is special."""
    for n, vocab in ((0, 100), (1, 1), (2, 2), (17, 33), (64, 1000), (13, 49152), (13, 32003)):
        yield _case(f"n{n}-v{vocab}", vocab, [ROWS[i % len(ROWS)] for i in range(n)])
    for name, row in {"plain": ROWS[1], "top-k": (0.9, 7, 1.0, 0.0), "top-p": (1.0, 0, 0.8, 0.0), "min-p": (1.0, 0, 1.0, 0.1),
                      "all": (0.8, 20, 0.9, 0.02)}.items():
        yield _grid(name, 50, row)
        yield _grid(name, 1009, row)
    yield _ties()
    yield _no_answer()


def _case(name: str, vocab: int, rows: list[Row]) -> Case:
    def build(seed: int) -> Call:
        draw = Draw(name, seed)
        turned = rows[seed:] + rows[:seed]
        return _call(draw.normal(len(rows), vocab, scale=2.0), turned, draw.uniform(len(rows)))

    return Case(name, Facts({"vocab_size": vocab}), build, _expect)


def _grid(name: str, vocab: int, row: Row, points: int = 499) -> Case:
    """One distribution, sampled at uniforms that lie evenly: each token must come as often as it is probable."""
    name = f"grid-{name}-v{vocab}"

    def build(seed: int) -> Call:
        logits = Draw(name, seed).normal(1, vocab, scale=2.0).expand(points, -1)
        return _call(logits.contiguous(), [row] * points, (torch.arange(points) + 0.5) / points)

    return Case(name, Facts({"vocab_size": vocab}), build, _expect)


def _ties() -> Case:
    """Logits of few values: the lower index is greater in every order; uniforms at both ends."""
    rows = [GREEDY, GREEDY, *((0.8, top_k, 1.0, 0.0) for top_k in (1, 2, 3)), (1.0, 0, 1.0, 1.0), (1.0, 0, 1e-6, 0.0)]

    def build(seed: int) -> Call:
        draw = Draw("ties", seed)
        logits = draw.integers(0, 3, 2 * len(rows), 70).to(torch.float32)
        return _call(logits, rows + rows, torch.tensor([0.0] * len(rows) + [1 - 2.0**-24] * len(rows)))

    return Case("ties", Facts({"vocab_size": 70}), build, _expect)


def _no_answer() -> Case:
    """Rows with a NaN, or nothing but -inf, among rows where only some logits are -inf."""
    rows = [row for row in (GREEDY, ROWS[1], ROWS[6]) for _ in range(4)]

    def build(seed: int) -> Call:
        draw = Draw("no-answer", seed)
        logits = draw.normal(len(rows), 70)
        logits[0::4, 13 + seed] = torch.nan
        logits[1::4] = -torch.inf
        logits[2::4, ::2] = -torch.inf
        return _call(logits, rows, draw.uniform(len(rows)))

    return Case("no-answer", Facts({"vocab_size": 70}), build, _expect)


def _call(logits: torch.Tensor, rows: Sequence[Row], uniform: torch.Tensor) -> Call:
    settled = [_settled(values, row) for values, row in zip(logits.to(torch.float64).numpy(), rows, strict=True)]
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*settled, strict=True)) if settled else ([], [], [], [])
    return {"logits": Arg(logits, is_strided=True), "temperature": Arg(torch.tensor(temperature, dtype=torch.float32)),
            "top_k": Arg(torch.tensor(top_k, dtype=torch.int32)), "top_p": Arg(torch.tensor(top_p, dtype=torch.float32)),
            "min_p": Arg(torch.tensor(min_p, dtype=torch.float32)), "uniform": Arg(uniform.to(torch.float32)),
            "out": Arg(torch.empty(len(rows), dtype=torch.int32), Role.OUT)}


def _ordered(logits: np.ndarray, temperature: float, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``top_k`` most probable tokens of a row, by falling probability and then by index, and their probabilities."""
    scaled = logits / float(np.float32(temperature))
    probs = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(probs)), -probs))[: top_k or None]
    return order, probs[order] / probs[order].sum()


def _settled(logits: np.ndarray, row: Row) -> Row:
    """``row`` with ``top_p`` and ``min_p`` moved to the middle between the two tokens that they separate."""
    temperature, top_k, top_p, min_p = row
    if temperature == 0 or np.isnan(logits).any() or np.isneginf(logits).all():
        return row
    _, probs = _ordered(logits, temperature, top_k)
    if 1e-3 < top_p < 1:
        sums = np.concatenate(([0.0], probs.cumsum()))
        at = int((sums < top_p).sum())
        top_p = float((sums[at - 1] + sums[at]) / 2)
        probs = probs[:at] / sums[at]
    if 0 < min_p < 1:
        ratios = np.concatenate((probs / probs[0], [0.0]))
        at = int((ratios >= min_p).sum())
        min_p = float((ratios[at - 1] + ratios[at]) / 2)
    return temperature, top_k, top_p, min_p


def _expect(call: Call) -> Mapping[str, Expected]:
    names = ("temperature", "top_k", "top_p", "min_p", "uniform")
    rows = zip(*(tensor(call, name).tolist() for name in names), strict=True)
    logits = tensor(call, "logits").to(torch.float64).numpy()
    return {"out": Tokens([_allowed(values, *row) for values, row in zip(logits, rows, strict=True)])}


def _allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> frozenset[int]:
    """The tokens whose stretch of the distribution holds ``uniform``, or comes as near as :data:`NEAR`."""
    if np.isnan(logits).any() or np.isneginf(logits).all():
        return frozenset((-1,))
    if temperature == 0:
        return frozenset((int(logits.argmax()),))
    order, probs = _ordered(logits, temperature, top_k)
    if top_p < 1:
        order = order[: int(np.searchsorted(probs.cumsum(), top_p)) + 1]
    probs = probs[: len(order)]
    is_kept = probs >= min_p * probs[0]
    order, probs = order[is_kept], probs[is_kept] / probs[is_kept].sum()
    in_vocabulary = order.argsort()
    order, ends = order[in_vocabulary], probs[in_vocabulary].cumsum()
    starts = np.concatenate(([0.0], ends[:-1]))
    return frozenset(order[(starts - NEAR <= uniform) & (uniform <= ends + NEAR)].tolist())
