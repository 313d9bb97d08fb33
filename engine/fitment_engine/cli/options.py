"""Options that every command shares: what to load and how; and the loading itself, with a progress bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitment.errors import FitmentError
from fitment_matrix.options import OPTIONS, memory

if TYPE_CHECKING:
    from fitment_engine.llm import LLM
    from fitment_engine.sampling_params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What to load and how."""
    group = parser.add_argument_group("model")
    group.add_argument("--device", help="a device's id, such as cpu:0 (default: the first that fits)")
    group.add_argument("--dtype", help="element type of activations: fp32, bf16 (default: the platform's first choice)")
    group.add_argument("--activations", help="how linear layers see activations: fp32, bf16, int8 (default: the platform's first choice)")
    group.add_argument("--kv-cache-dtype", dest="kv_dtype", help="element type of the key-value cache: fp32, bf16")
    group.add_argument("--max-model-len", type=positive, help="longest sequence, output included (default: what fits)")
    group.add_argument("--max-num-seqs", type=positive, help="sequences that are computed together")
    group.add_argument("--max-batch-tokens", type=positive, help="tokens of one step")
    group.add_argument("--kv-memory", dest="kv_memory_bytes", type=memory, help="memory of the key-value cache, such as 512M")
    group.add_argument("--feature", dest="features", action="append", default=None, help="insist on a feature; can be repeated")
    group.add_argument("--chat-template", type=Path, help="a file with a Jinja chat template")


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How to sample; the names are those of SamplingParams."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=positive, default=max_tokens, help=f"most tokens of an answer (default {max_tokens})")
    group.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token (default)")
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--repetition-penalty", type=float, default=1.0)
    group.add_argument("--presence-penalty", type=float, default=0.0)
    group.add_argument("--frequency-penalty", type=float, default=0.0)
    group.add_argument("--seed", type=int)
    group.add_argument("--stop", action="append", help="a text that ends the answer; can be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")


SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "seed", "stop", "ignore_eos")


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling parameters of the command line; wrong ones raise with all problems at once."""
    from fitment_engine.sampling_params import SamplingParams

    return SamplingParams(**{name: getattr(arguments, name) for name in SAMPLING})


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Progress on stderr, shown on a terminal alone; yields a function of what happens, how much is done, and of how much."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console, transient=True,
                  disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None, visible=False)
        yield lambda words, done, total: progress.update(task, description=words, completed=done, total=total, visible=True)


def load_model(arguments: argparse.Namespace) -> LLM:
    """Resolve, recognise, admit and load the model of the command line; says on stderr what was planned."""
    from fitment.formats import recognise
    from fitment.plugins import load
    from fitment_engine.fetch import resolve

    template = None
    if arguments.chat_template is not None:
        try:
            template = arguments.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FitmentError(f"--chat-template {arguments.chat_template}: {error}") from error
    options = {name: getattr(arguments, name) for name in OPTIONS if getattr(arguments, name) is not None}
    if arguments.features:
        options["features"] = tuple(arguments.features)
    with _progress() as report:
        checkpoint = recognise(resolve(arguments.model, report))

    from fitment_engine.llm import LLM, admit_here  # torch, from here on

    plan = admit_here(checkpoint, load(), arguments.device, **options)
    print(headline(arguments.model, plan), file=sys.stderr)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    done = 0

    def loaded(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report("loading", done, total)

    with _progress() as report:
        return LLM.from_plan(checkpoint, plan, template, loaded)


def headline(name: str, plan: Any) -> str:
    """One line on what was planned."""
    kernel = plan.bindings[0].selection.chosen
    device = plan.device
    graphs = "graphs on" if plan.graph_batch_sizes else "no graphs"
    tokens = plan.num_blocks * plan.kv_layout.block_size
    weights = ", ".join(sorted(plan.weights()))
    return (f"{name} on {device.id} ({device.hardware or device.facts.get('arch', '')}): {plan.request.format} {weights} · "
            f"{kernel.speed.name.lower()} · activations {plan.activations} · KV {plan.kv_dtype}, {tokens} tokens · {graphs}")
