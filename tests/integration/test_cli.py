"""The ``fitment`` command as a user meets it: what it prints, where, and its exit status."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fitment.formats import base, safetensors
from fitment_engine.cli import main
from support import TINY

FP32 = ["--dtype", "fp32", "--activations", "fp32", "--kv-cache-dtype", "fp32"]


def write_lines(path: Path, *items: object) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items), encoding="utf-8")
    return path


def results(text: str) -> dict[str, dict[str, object]]:
    return {item["id"]: item for item in map(json.loads, text.splitlines())}


def test_run_continues_a_raw_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(TINY), "hello", "--raw", "--max-tokens", "8", "--ignore-eos", *FP32]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n") and captured.out.strip()
    assert "8 tokens" in captured.err and "s to first" in captured.err


def test_run_reads_the_question_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["run", str(TINY), "--raw", "--max-tokens", "8", "--ignore-eos", *FP32]) == 0
    assert capsys.readouterr().out.strip()


def test_generate_writes_a_result_a_line_and_wrong_lines_harm_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_lines(
        tmp_path / "in.jsonl", {"id": "a", "prompt": "hello"}, "{broken", {"prompt_token_ids": [1, 2, 3], "max_tokens": 2},
        {"id": "d", "prompt": "x", "temprature": 1}, {"id": "e"}, {"id": "f", "prompt_token_ids": [9999]}, [1],
        {"id": "h", "prompt": "x", "temperature": -1}, {"id": "i", "prompt": 5})
    assert main(["generate", str(TINY), "--prompts", str(prompts), "--max-tokens", "4", "--ignore-eos", *FP32]) == 1
    captured = capsys.readouterr()
    found = results(captured.out)
    assert set(found) == {"a", "2", "3", "d", "e", "f", "7", "h", "i"}
    assert len(found["a"]["outputs"][0]["token_ids"]) == 4  # type: ignore[index]
    assert len(found["3"]["outputs"][0]["token_ids"]) == 2  # type: ignore[index]
    assert {key for key, item in found.items() if "error" in item} == {"2", "d", "e", "f", "7", "h", "i"}
    assert "temprature" in str(found["d"]["error"])
    assert "9 done, 7 refused" in captured.err


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", *({"id": str(i), "prompt_token_ids": [i + 1, 2]} for i in range(6)))
    whole, partial = tmp_path / "whole.jsonl", tmp_path / "partial.jsonl"
    command = ["generate", str(TINY), "--prompts", str(prompts), "--max-tokens", "4", "--ignore-eos", *FP32]
    assert main([*command, "--output", str(whole)]) == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert main([*command, "--output", str(partial)]) == 0
    assert results(partial.read_text(encoding="utf-8")) == results(whole.read_text(encoding="utf-8"))
    assert len(partial.read_bytes().splitlines()) == 6
    assert "3 done, 0 refused or failed, 3 were there already" in capsys.readouterr().err


def test_generate_refuses_a_file_that_is_not_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, other = write_lines(tmp_path / "in.jsonl", {"prompt": "x"}), tmp_path / "notes.txt"
    other.write_text("dear diary\n", encoding="utf-8")
    assert main(["generate", str(TINY), "--prompts", str(prompts), "--output", str(other)]) == 1
    assert "notes.txt" in capsys.readouterr().err
    assert other.read_text(encoding="utf-8") == "dear diary\n"


def test_bench_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--input-len", "16", "--output-len", "4", "--repeats", "2", "--concurrency", "2"]
    assert main(["bench", str(TINY), *shape, "--json", *FP32]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {"load_s", "prefill_tokens_per_s", "decode_tokens_per_s", "output_tokens_per_s_at_2"} <= set(figures)
    assert all(figure["min"] <= figure["median"] <= figure["max"] for figure in figures.values())


REFUSED = {
    "no such device": ["--device", "abacus:0"],
    "no such feature": ["--feature", "telepathy"],
    "a feature that the engine has not": ["--feature", "beam_search"],
    "a dtype that no kernel has": ["--dtype", "fp8_e4m3fn"],
    "a cache that no kernel has": ["--kv-cache-dtype", "int8"],
    "a context beyond the model's": ["--max-model-len", "4096"],
    "a context beyond memory": ["--max-model-len", "512", "--kv-memory", "1K"],
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_before_a_weight_is_read(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_arguments: object) -> None:
        raise AssertionError("a weight was read")

    for checkpoint in base.Checkpoint.__subclasses__():
        monkeypatch.setattr(checkpoint, "read", read)
    assert safetensors.FORMAT.matches(TINY)
    assert main(["run", str(TINY), "hello", "--raw", *options]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert options[1] in captured.err or options[-1] in captured.err
    assert "Traceback" not in captured.err


def test_wrong_sampling_parameters_are_all_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(TINY), "hello", "--temperature", "-1", "--top-p", "2"]) == 1
    error = capsys.readouterr().err
    assert "temperature" in error and "top_p" in error


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere", "smollm2-135"])
def test_an_unknown_model_is_a_message(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", name, "hello"]) == 1
    error = capsys.readouterr().err
    assert name in error and "Traceback" not in error


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped"])
def test_a_broken_checkpoint_is_a_message(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data = {"empty": bytearray(), "truncated": data[:-10], "flipped": bytearray([data[0] ^ 0x80, *data[1:]])}[damage]
    weights.write_bytes(data)
    assert main(["run", str(model), "hello", "--raw"]) == 1
    error = capsys.readouterr().err
    assert "model.safetensors" in error and "Traceback" not in error


def test_wrong_usage_exits_with_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--max-tokens", "0"])
    assert caught.value.code == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", [["fitment", "run", str(TINY), "hello", "--raw", "--ignore-eos", *FP32], ["capabilities", "matrix"]],
                         ids=["fitment", "capabilities"])
def test_a_full_disk_is_a_message(command: list[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        program = Path(sys.executable).with_name(command[0])
        done = subprocess.run([program, *command[1:]], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True,
                              check=False)
    assert done.returncode == 1
    assert "the output cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variable", ["FITMENT_CPU_THREADS", "FITMENT_CPU_ISA", "FITMENT_PLUGINS"])
def test_a_wrong_variable_is_a_message(variable: str) -> None:
    value = "bogus"
    program = Path(sys.executable).with_name("fitment")
    done = subprocess.run([program, "run", TINY, "hello", "--raw"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                          env={**os.environ, variable: value})
    assert done.returncode == 1
    assert variable in done.stderr
    assert value in done.stderr
    assert "Traceback" not in done.stderr
