"""Fitment beside its peers on this machine: every measure of every engine in turn, round after round, and the ratios between them.

    make bench                                             # Fitment and llama.cpp
    .venv/bin/python benchmarks/peers.py --peer vllm=/path/to/a/venv/bin/python,/path/to/model   # and vLLM, where it is installed

Machines are shared and noisy: what counts is the ratio of two measures of the same round, its median, and its range.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

MEASURES: dict[str, dict[str, Any]] = {
    "prefill 512": {"measure": "prefill", "length": 512},
    "decode": {"measure": "decode", "context": 32, "output": 64},
    "decode at 4K": {"measure": "decode", "context": 4000, "output": 32},
    "8 concurrent": {"measure": "throughput", "concurrency": 8, "length": 128, "output": 128},
    "32 concurrent": {"measure": "throughput", "concurrency": 32, "length": 128, "output": 128},
}
"""What is measured, in tokens a second."""


@dataclass
class Runner:
    """One engine in a process of its own."""

    name: str
    process: subprocess.Popen[str]
    load_s: float = 0.0
    measures: frozenset[str] = frozenset()
    results: dict[str, list[float]] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether it is Fitment."""
        return self.name.startswith("fitment")

    @classmethod
    def start(cls, name: str, python: str, script: str, options: Mapping[str, Any]) -> Runner:
        process = subprocess.Popen([python, str(HERE / "runners" / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        runner = cls(name, process)
        started = time.perf_counter()
        hello = runner.ask(dict(options))
        runner.load_s = time.perf_counter() - started
        runner.measures = frozenset(hello["measures"])
        return runner

    def ask(self, request: Mapping[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}")
        return json.loads(answer)


def limits(threads: int) -> dict[str, float]:
    """Read bandwidth and int8 peak of this machine, now."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "limits"
        subprocess.run([os.environ.get("CXX", "g++"), "-O3", "-march=native", "-pthread", HERE / "limits.cpp", "-o", program], check=True)
        found: dict[str, float] = json.loads(subprocess.run([program, str(threads)], check=True, capture_output=True, text=True).stdout)
        return found


def first_token_seconds(model: str) -> float:
    """From the start of a process to the first token of its answer."""
    started = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("fitment"), "run", model, "Hello", "--max-tokens", "1"], check=True, capture_output=True)
    return time.perf_counter() - started


def quantized(model: str, python: str, target: Path) -> str:
    """The model as Q4_0, made by llama.cpp's own quantizer."""
    if not target.exists():
        code = ("import sys, llama_cpp as l; p = l.llama_model_quantize_default_params(); p.ftype = 2; p.allow_requantize = True\n"
                "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))")
        subprocess.run([python, "-c", code, model, str(target)], check=True, capture_output=True)
    return str(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON[,MODEL]",
                        help="llama_cpp or vllm, and a Python that has it")
    parser.add_argument("--measure", action="append", choices=MEASURES, help="only these")
    parser.add_argument("--activations", action="append", help="of Fitment; default: bf16 and int8")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()

    from fitment_engine.fetch import resolve

    model = str(resolve(arguments.model))
    options = {"model": model, "max_model_len": 4096, "max_num_seqs": 32, "threads": arguments.threads}
    os.environ["FITMENT_CPU_THREADS"] = str(arguments.threads)
    runners = [Runner.start(f"fitment {name}", sys.executable, "fitment_runner.py", {**options, "engine": {"activations": name}})
               for name in arguments.activations or ("bf16", "int8")]
    for peer in arguments.peer:
        name, _, rest = peer.partition("=")
        python, _, own_model = rest.partition(",")
        runners.append(Runner.start(name, python, f"{name}_runner.py", {**options, "model": own_model or model}))
        if name == "llama_cpp":
            q4_0 = quantized(model, python, Path(model).with_suffix(".Q4_0.gguf"))
            runners.append(Runner.start("llama_cpp Q4_0", python, "llama_cpp_runner.py", {**options, "model": q4_0}))
    seen: list[dict[str, float]] = []
    for repeat in range(arguments.repeats + 1):  # the first round warms up
        if repeat:
            seen.append(limits(arguments.threads))
        for name, request in MEASURES.items():
            if arguments.measure and name not in arguments.measure:
                continue
            for runner in runners:
                if request["measure"] in runner.measures:
                    found = runner.ask({**request, "seed": 100 * repeat})
                    if repeat:
                        runner.results.setdefault(name, []).append(found)
        print(f"round {repeat} of {arguments.repeats}", file=sys.stderr)
    starts = [first_token_seconds(model) for _ in range(arguments.repeats)]
    report(runners, seen, starts)
    if arguments.json:
        arguments.json.write_text(json.dumps({
            "limits": seen, "process_start_to_first_token_s": starts,
            "engines": {runner.name: {"load_s": runner.load_s, "peak_bytes": runner.ask({"measure": "peak_bytes"}), **runner.results}
                        for runner in runners}}, indent=1) + "\n", encoding="utf-8")


def report(runners: list[Runner], seen: list[dict[str, float]], starts: list[float]) -> None:
    """Print medians, and the ratios of the first runner to each other one."""
    bandwidth, peak = (statistics.median(limit[key] for limit in seen) for key in ("read_bytes_per_s", "int8_macs_per_s"))
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s; int8 peak {peak / 1e9:.0f} GMAC/s; "
          f"process start to first token {statistics.median(starts):.2f} s")
    for runner in runners:
        print(f"{runner.name}: ready in {runner.load_s:.2f} s, peak memory {runner.ask({'measure': 'peak_bytes'}) / 1e6:.0f} MB")
    for name in MEASURES:
        for runner in runners:
            if name not in runner.results:
                continue
            values = runner.results[name]
            line = f"{name:14} {runner.name:16} {statistics.median(values):9.1f} tokens/s"
            peers = [other for other in runners if not other.is_own and name in other.results] if runner.is_own else []
            for other in peers:
                ratios = [a / b for a, b in zip(values, other.results[name], strict=True)]
                line += f"   {statistics.median(ratios):.2f} × {other.name} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(line)


if __name__ == "__main__":
    main()
