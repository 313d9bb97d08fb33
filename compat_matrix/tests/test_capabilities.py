"""The ``capabilities`` command as a user meets it: what it prints, where, and its exit status."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fitment.conditions import equals
from fitment.errors import FitmentError
from fitment.facts import Value
from fitment.features import FEATURES
from fitment.formats import formats
from fitment.kernels import Kernel, Speed
from fitment_matrix.cli import COMMANDS, main
from fitment_matrix.options import memory
from fitment_matrix.testing import ENGINE, all_kernels, isolate, plugin, write_model

MIB = 1 << 20
READ = {fmt.name: f"{len(fmt.specs)} of {len(fmt.specs) + len(fmt.recognised)} encodings" for fmt in formats().values()}


@pytest.fixture(autouse=True)
def null_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The null platform and a made-up engine."""
    isolate(monkeypatch, ENGINE, null="fitment.null.plugin")
    monkeypatch.setattr("fitment_matrix.cli.overview.environment", lambda: {"fitment": "0.1.0", "Linux": "6.1", "Python": "3.11.7"})


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "tiny"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status and what was printed; nothing goes to stderr."""
    status = main(arguments)
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, captured.out


def read(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What ``--json`` gives."""
    return json.loads(run(capsys, *arguments, "--json")[1])


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that fails."""
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys)
    assert status == 0
    assert text == f"""\
Fitment 0.1.0 · Linux 6.1, Python 3.11.7

  device  hardware  arch    memory   formats  features  worst evidence
  null:0  null      null_1  8.0 GiB  2 of 2   3 of {len(FEATURES)}   declared

  reference on null:0  gguf ({READ["gguf"]}), safetensors ({READ["safetensors"]}), continuous_batching, kv_cache.bf16, sampling
  not here             chunked_prefill (the engine has none yet), prefix_caching (the engine has none yet), graph_capture \
(needs kernels that a graph can hold), kv_cache.fp32 (the engine has none yet) … {len(FEATURES) - 3 - 4} more: capabilities features

  null:0 is slow  torch computes linear layers (null.reference.linear); the platform has no other kernel for them
"""
    data = read(capsys)
    assert data["devices"][0]["features"]["graph_capture"] == {
        "status": "unsupported", "engine": True, "why": "needs kernels that a graph can hold"}
    assert data["platforms"] == {"null": ["null:0"]}
    assert data["broken"] == []


def test_no_device_is_a_no(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, None, toy=plugin("toy", all_kernels("toy"), {"toy-1": {}}))
    assert run(capsys)[0] == 1


def test_check_says_yes_in_one_line_and_why_it_is_slow(capsys: pytest.CaptureFixture[str], model: str) -> None:
    status, text = run(capsys, "check", model, "--hardware", "null")
    digest = read(capsys, "check", model, "--hardware", "null")["digest"]
    assert status == 0
    assert text == f"""\
Yes. null (null_1, 8.0 GiB) runs tiny: safetensors reference, 512 tokens, fp32 cache, no graphs. Plan {digest}

  slow  torch computes linear layers (null.reference.linear); the platform has no other kernel for them
"""
    assert len(digest) == 12


def test_check_says_no_with_every_reason_and_the_way_out(capsys: pytest.CaptureFixture[str], model: str) -> None:
    asked = ("check", model, "--hardware", "null", "--kv-cache-dtype", "int8", "--feature", "graph_capture", "--max-model-len", "600")
    status, text = run(capsys, *asked)
    assert status == 1
    assert text == """\
No. null (null_1, 8.0 GiB) cannot run this request: 3 reasons.

  FIT-REQ-MAX-MODEL-LEN  the request needs max_model_len at most 512, for which the model was made; max_model_len is 600
  FIT-REQ-KV-DTYPE       the request needs kv_dtype in fp32 bf16 fp16; kv_dtype is int8
  FIT-BUILD-GRAPH-SAFE   graph_capture needs kernels that a graph can hold; graph_safe is never for null.reference.linear, \
null.reference.embedding, null.reference.rms_norm and 4 more

Nearest that would run, best first
  --kv-cache-dtype fp32 --max-model-len 512 without --feature graph_capture  safetensors reference, 512 tokens, fp32 cache, no graphs
"""
    data = read(capsys, *asked)
    assert data["answer"] == "no"
    assert [reason["code"] for reason in data["reasons"]] == ["FIT-REQ-MAX-MODEL-LEN", "FIT-REQ-KV-DTYPE", "FIT-BUILD-GRAPH-SAFE"]
    assert all(reason["sentence"] in text for reason in data["reasons"])
    assert [near["options"] in text for near in data["nearest"]] == [True]


TOYS: dict[str, dict[str, Value]] = {"small": {"arch": "s", "memory_bytes": 4 * MIB}, "large": {"arch": "l", "memory_bytes": 64 * MIB}}

ASKED = [
    ["--kv-cache-dtype", "fp16"],
    ["--kv-cache-dtype", "int8", "--hardware", "small"],
    ["--max-model-len", "600", "--max-num-seqs", "0"],
    ["--max-batch-tokens", "100000", "--hardware", "large"],
    ["--max-model-len", "512", "--hardware", "small", "--max-batch-tokens", "3000"],
    ["--kv-memory", "1K", "--max-model-len", "512"],
    ["--dtype", "fp8_e4m3fn", "--activations", "int3"],
    ["--kernel", "linear=nobody"],
    ["--feature", "kv_cache.int8", "--hardware", "small"],
]


@pytest.mark.parametrize("asked", ASKED, ids=" ".join)
def test_every_suggestion_is_options_that_work(
    asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    kernels = [*all_kernels("toy", without=("write_kv",)), Kernel("write_kv", "toy.any", "made_up_kernels:w", equals("arch", "l")),
               Kernel("write_kv", "toy.bf16", "made_up_kernels:w", equals("kv_dtype", "bf16"))]
    isolate(monkeypatch, ENGINE, toy=plugin("toy", kernels, TOYS, devices={"toy:0": TOYS["small"], "toy:1": TOYS["large"]}))
    where = [] if "--hardware" in asked else ["--device", "toy:0"]
    assert main(["check", model, *asked, *where]) == 1
    capsys.readouterr()
    nearest = read(capsys, "check", model, *asked, *where)["nearest"]
    assert nearest
    for near in nearest:
        kept, new = [*asked, *where], shlex.split(near["options"])
        while "without" in new:
            at = new.index("without")
            option, value = new[at + 1 : at + 3]
            i = next(i for i in range(len(kept)) if kept[i : i + 2] == [option, value])
            del new[at : at + 3], kept[i : i + 2]
        if {"--device", "--hardware"} & set(new):  # elsewhere replaces where
            kept = [word for i, word in enumerate(kept) if not {"--device", "--hardware"} & set(kept[max(0, i - 1) : i + 1])]
        assert main(["check", model, *kept, *new]) == 0, near
        assert capsys.readouterr().out.startswith("Yes. ")


def test_check_tries_every_device_and_reports_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    devices = {"toy:0": {"memory_bytes": MIB}, "toy:1": {"memory_bytes": 64 * MIB}}
    isolate(monkeypatch, ENGINE, toy=plugin("toy", all_kernels("toy"), devices=devices))
    assert run(capsys, "check", model)[1].startswith("Yes. toy:1 (64.0 MiB)")
    assert run(capsys, "check", model, "--kv-cache-dtype", "fp16")[1].startswith("No. toy:0 (1.0 MiB)")


def test_plan_shows_kernels_memory_and_choices(capsys: pytest.CaptureFixture[str], model: str) -> None:
    status, text = run(capsys, "plan", model, "--hardware", "null", "--kv-memory", "1M")
    data = read(capsys, "plan", model, "--hardware", "null", "--kv-memory", "1M")
    assert status == 0
    for wanted in (f"tiny on null (null_1, 8.0 GiB): plan {data['digest']}", "safetensors: BF16 → Dense bf16",
                   "layout null, 128 blocks of 16 tokens", "linear BF16", "null.reference.linear", "usable 7.2 GiB",
                   "dtype is fp32, the platform's first choice"):
        assert wanted in text
    assert data["num_blocks"] == 128
    assert data["memory"]["cache"] == MIB
    assert all(choice in text for choice in data["choices"])
    assert all(binding["kernel"] in text for binding in data["bindings"])


def test_plan_refuses_as_check_does(capsys: pytest.CaptureFixture[str], model: str) -> None:
    asked = (model, "--hardware", "null-2")
    assert run(capsys, "plan", *asked) == run(capsys, "check", *asked)
    assert read(capsys, "plan", *asked) == read(capsys, "check", *asked)


def test_a_name_is_resolved_by_what_engines_provide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    def resolve(name: str) -> Path:
        if name != "tiny-llama":
            raise FitmentError(f"{name}: no such model; known are tiny-llama")
        return Path(model)

    module = ModuleType("made_up_resolver")
    module.resolve = resolve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_resolver", module)
    point = EntryPoint("x", "made_up_resolver:resolve", "fitment.resolvers")
    monkeypatch.setattr("fitment_matrix.cli._common.entry_points", lambda group: (point,) if group == "fitment.resolvers" else ())
    assert run(capsys, "check", "tiny-llama", "--hardware", "null")[1].startswith("Yes.")
    assert "known are tiny-llama" in error(capsys, "check", "tiny-lama")
    assert run(capsys, "check", model)[1].startswith("Yes."), "a path needs no resolver"


def test_explain_an_encoding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [*all_kernels("toy", without=("linear",)), Kernel("linear", "toy.usual", "made_up_kernels:l"),
               Kernel("linear", "toy.fast", "made_up_kernels:l", equals("arch", "x"), Speed.NATIVE),
               Kernel("linear", "toy.slow", "made_up_kernels:l", speed=Speed.REFERENCE)]
    isolate(monkeypatch, None, toy=plugin("toy", kernels, {"toy-1": {"arch": "y"}}))
    status, text = run(capsys, "explain", "toy-1", "gguf:Q4_1")
    assert status == 0
    assert text == """\
toy-1 × gguf:Q4_1: portable, declared

  family       GroupAffine 4-bit, groups of 32, minimums
  activations  fp32 portable, bf16 portable, fp16 portable, int8 portable, fp8_e4m3fn portable
  chosen  linear     toy.usual, portable
  chosen  embedding  toy.embedding, portable

  passed by
  toy.slow               would serve, reference, after the chosen one
  toy.fast  FIT-HW-ARCH  needs arch = x; arch is y

  to raise: on this hardware, pytest --pyargs fitment.conformance --platform toy --evidence FILE
"""
    data = read(capsys, "explain", "toy-1", "gguf:Q4_1")
    assert data["family"] == "GroupAffine 4-bit, groups of 32, minimums"
    assert [verdict["kernel"] for verdict in data["traces"]["linear"]] == ["toy.usual", "toy.slow", "toy.fast"]


@pytest.mark.parametrize(("thing", "status", "words"), [
    ("gguf", 0, "null × gguf: reference"),
    ("safetensors:F16", 0, "Dense fp16"),
    ("gguf:Q6_K", 1, "FIT-REQ-FORMAT"),
    ("linear", 0, "null.reference.linear"),
    ("lora", 1, "FIT-OP-LORA"),
    ("structured_output", 0, "made-up 1.2 has it not"),
    ("kv_cache.int8", 1, "needs kv_dtype in fp32 bf16 fp16"),
])
def test_explain_answers_about_everything(thing: str, status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = run(capsys, "explain", "null", thing)
    assert (found, words in text) == (status, True)
    assert read(capsys, "explain", "null", thing)["thing"] == thing


def test_explain_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert "null:0 × gguf" in run(capsys, "explain", "null:0", "gguf")[1]


def test_features_are_listed_with_the_engine_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "features", "--hardware", "null")
    rows = {line.split()[0]: line for line in text.splitlines()[1:]}
    assert status == 0
    assert list(rows) == list(FEATURES)
    assert rows["graph_capture"].split()[1:3] == ["yes", "unsupported"]
    assert "FIT-BUILD-GRAPH-SAFE" in rows["graph_capture"]
    assert rows["lora"].split()[1:3] == ["no", "unsupported"]
    assert rows["tracing"].split()[1:3] == ["no", "any"]
    assert [entry["feature"] for entry in read(capsys, "features")] == list(FEATURES)


def test_matrix_filters(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "matrix", "--hardware", "null", "--format", "gguf:Q4_1", "--feature", "lora")
    assert status == 0
    assert text == """\
  hardware  what       status       evidence  kernels, notes, reasons
  null      gguf:Q4_1  reference    declared  null.reference.linear null.reference.embedding
  null      lora       unsupported            FIT-OP-LORA adapters needs a kernel for lora; op is none
"""
    data = read(capsys, "matrix", "--platform", "null", "--status", "reference", "--format", "safetensors")
    assert [(cell["hardware"], cell["thing"]) for cell in data["cells"]] == [
        ("null", thing) for thing in ("safetensors", "safetensors:F32", "safetensors:F16", "safetensors:BF16")]
    assert list(data["hardware"]) == ["null"]
    assert run(capsys, "matrix", "--status", "native", "--hardware", "null", "--format", "gguf") == (
        1, "  no cell is left by these filters\n")


def test_the_whole_matrix_as_text_and_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "matrix")[1]
    assert text.startswith("  hardware  platform  gguf                 safetensors\n"
                           "  null      null      reference, declared  reference, declared\n")
    assert "  null-2    null      unsupported          unsupported\n" in text
    markdown = run(capsys, "matrix", "--markdown")[1]
    assert markdown.startswith("# What runs where\n")
    assert f"| null | null | reference, {READ['gguf']}, declared | reference, {READ['safetensors']}, declared |" in markdown
    assert "| gguf:Q4_1 | null-2 | `FIT-HW-ARCH` needs arch = null_1; arch is null_2 |" in markdown


def test_matrix_writes_the_snapshot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "matrix", "--write", str(tmp_path / "new" / "folder")) == (0, "")
    written = json.loads((tmp_path / "new" / "folder" / "matrix.json").read_text(encoding="utf-8"))
    assert written == read(capsys, "matrix")
    assert (tmp_path / "new" / "folder" / "matrix.md").read_text(encoding="utf-8") == run(capsys, "matrix", "--markdown")[1]
    (tmp_path / "file").touch()
    assert "--write" in error(capsys, "matrix", "--write", str(tmp_path / "file"))


@pytest.mark.parametrize(("arguments", "wanted"), [
    (["check", "MODEL", "--hardware", "nul"], "hardware 'nul' is not known; did you mean null or null-2?"),
    (["check", "MODEL", "--device", "toy:0"], "device 'toy:0' is not known; known are null:0"),
    (["check", "nowhere/at/all"], "nowhere/at/all: no such file or directory"),
    (["explain", "h100", "gguf"], "hardware 'h100' is not known; known are null, null-2, null:0"),
    (["explain", "null", "chunked_prefil"], "did you mean chunked_prefill"),
    (["matrix", "--format", "guf"], "format 'guf' is not known; did you mean gguf"),
    (["matrix", "--status", "fast"], "status 'fast' is not known; known are native"),
    (["plugins", "nil"], "plugin 'nil' is not known; did you mean null?"),
])
def test_what_is_not_known_is_one_message_with_a_guess(
    arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    message = error(capsys, *(model if word == "MODEL" else word for word in arguments))
    assert wanted in message
    assert message.startswith("capabilities: ")
    assert message.count("\n") == 1


def test_an_unknown_feature_is_guessed_too(capsys: pytest.CaptureFixture[str], model: str) -> None:
    status, text = run(capsys, "check", model, "--feature", "graph_captures")
    assert status == 1
    assert "feature is 'graph_captures' → did you mean graph_capture" in text


@pytest.mark.parametrize("arguments", [["nonsense"], ["check"], ["check", "x", "--hardware", "a", "--device", "b"],
                                       ["check", "x", "--kv-memory", "much"], ["check", "x", "--kernel", "linear"],
                                       ["check", "x", "--max-num-seqs", "few"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("1K", 1024), ("1.5M", 1572864), ("2GiB", 2 << 30), ("3 TB", 3 << 40)])
def test_amounts_of_memory(text: str, number: int) -> None:
    assert memory(text) == number


def test_a_broken_pipe_is_no_error() -> None:
    environment = {**os.environ, "FITMENT_PLUGINS": "null=fitment.null.plugin"}
    command = f"{sys.executable} -m fitment_matrix.cli matrix --json | head -c 11"
    found = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ('{\n "schema"', "")


def test_no_command_imports_torch(model: str) -> None:
    commands = [[], ["check", model], ["check", model, "--feature", "lora"], ["plan", model, "--hardware", "null"], ["features"],
                ["explain", "null", "gguf"], ["matrix"], ["plugins"], ["plugins", "null"], ["matrix", "--markdown"]]
    assert {command[0] for command in commands if command} == set(COMMANDS)
    code = ("import sys\nfrom fitment_matrix.cli import main\n"
            f"for command in {commands!r}:\n    main(command)\n    main([*command, '--json'])\n"
            "assert not {'torch', 'triton', 'rich', 'numpy'} & set(sys.modules), 'something heavy was imported'\n")
    environment = {**os.environ, "FITMENT_PLUGINS": "null=fitment.null.plugin"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
