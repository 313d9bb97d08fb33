"""Releasing what was read: the memory goes, the values stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fitment.formats import _files, recognise
from fitment.weights.dense import Dense

BIG = 1 << 22


def resident() -> int:
    """Bytes of this process that lie on files called ``big.bin``."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith("big.bin")
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's list of a process's memory")
def test_pages_are_given_back_and_come_again(tmp_path: Path) -> None:
    path = tmp_path / "big.bin"
    path.write_bytes(np.arange(BIG // 4, dtype=np.int32).tobytes())
    buffer = _files.map_file(path)
    values = torch.frombuffer(buffer, dtype=torch.int32)
    total = int(values.sum())
    before = resident()
    assert before >= BIG
    _files.forget(buffer, 100, BIG - 100)
    assert resident() <= BIG // 8
    assert int(values.sum()) == total


def test_what_was_read_stays_valid() -> None:
    checkpoint = recognise(Path(__file__).parents[3] / "tests" / "data" / "tiny-llama")
    name = "model.embed_tokens.weight"
    weight = checkpoint.read(name)
    assert isinstance(weight, Dense)
    wanted = weight.values.clone()
    checkpoint.release(name)
    assert torch.equal(weight.values, wanted)
    again = checkpoint.read(name)
    assert isinstance(again, Dense)
    assert torch.equal(again.values, wanted)
