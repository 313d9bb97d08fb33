"""Hardware profiles from a file, devices, and the layout of the key-value cache."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fitment.errors import Problems
from fitment.facts import Facts, Value
from fitment.hardware import AXES, Device, Hardware, KVLayout, Listing, load_hardware


def write(folder: Path, text: str) -> Path:
    path = folder / "hardware.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_profiles_take_defaults_and_what_they_are_like(tmp_path: Path) -> None:
    found = load_hardware(write(tmp_path, """
        [defaults]
        os = "linux"
        memory_bytes = 1024

        [hardware.small]
        title = "Small 1"
        source = "data sheet"
        facts = { arch = "s1", isa = ["b", "a"], cores = 2 }

        [hardware.large]
        title = "Large 1"
        like = "small"
        facts = { cores = 8, memory_bytes = 4096, "acme.fast" = true, memory_bandwidth = 1.5e11 }

        [hardware.empty-set]
        title = "None"
        facts = { isa = [], os = "darwin" }
    """), "acme")
    small: dict[str, Value] = {"os": "linux", "memory_bytes": 1024, "arch": "s1", "isa": frozenset(("a", "b")), "cores": 2}
    assert found == (
        Hardware("small", "acme", "Small 1", Facts(small), "data sheet"),
        Hardware("large", "acme", "Large 1",
                 Facts({**small, "cores": 8, "memory_bytes": 4096, "acme.fast": True, "memory_bandwidth": 1.5e11})),
        Hardware("empty-set", "acme", "None", Facts({"os": "darwin", "memory_bytes": 1024, "isa": frozenset()})),
    )


def test_a_file_may_be_empty(tmp_path: Path) -> None:
    assert load_hardware(write(tmp_path, ""), "acme") == ()


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, """
        [default]
        os = "linux"

        [hardware.untitled]
        facts = { arch = "a" }

        [hardware.bare]

        [hardware.copy]
        title = "Copy"
        like = "original"
        facts = {}

        [hardware.original]
        title = "Original"
        sorce = "data sheet"
        facts = {}
    """)
    with pytest.raises(Problems) as caught:
        load_hardware(path, "acme")
    assert caught.value.subject == str(path)
    assert caught.value.problems == (
        "'default' is neither [defaults] nor [hardware.NAME]",
        "hardware 'untitled' lacks title",
        "hardware 'bare' lacks title, facts",
        "hardware 'copy': like = 'original' names no profile above it",
        "hardware 'original': 'sorce' is none of title, source, like, facts",
    )


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    with pytest.raises(tomllib.TOMLDecodeError):
        load_hardware(write(tmp_path, "[hardware"), "acme")


def test_a_layout_gives_shapes_in_its_orders_and_bytes() -> None:
    layout = KVLayout("toy", 16, ("block", "head", "dim", "slot"), ("block", "head", "slot", "dim"), ("bf16",))
    assert layout.shape(layout.k_order, num_blocks=7, num_kv_heads=3, head_size=64) == (7, 3, 64, 16)
    assert layout.shape(layout.v_order, num_blocks=7, num_kv_heads=3, head_size=64) == (7, 3, 16, 64)
    assert layout.block_bytes(num_kv_heads=3, head_size=64, itemsize=2) == 2 * (16 * 3 * 64 * 2)  # keys and values
    assert set(layout.k_order) == AXES


def test_a_device_is_hashable_and_a_listing_starts_empty() -> None:
    device = Device("acme:0", "acme", "small", "Small 1", Facts({"isa": frozenset(("a",))}))
    assert device.torch_device == "cpu"
    assert {device: 1}[Device("acme:0", "acme", "small", "Small 1", Facts({"isa": frozenset(("a",))}))] == 1
    assert Listing() == Listing((), ())
