"""The options of a request on the command line; the names are those of the engine's own commands."""

from __future__ import annotations

import argparse

from fitment.ops import OPS
from fitment.plugins import Registry
from fitment_matrix.cli._common import add_where, engine_of, open_model, places
from fitment_matrix.gate import Plan, Request, Unfit, admit_first
from fitment_matrix.options import OPTIONS, memory


def kernel(text: str) -> tuple[str, str]:
    """An op and a kernel's name, of ``linear=acme.w4a16``."""
    op, separator, name = text.partition("=")
    if not separator or op not in OPS or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not OP=NAME with an op of {', '.join(OPS)}")
    return op, name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, its options, and where it is to run."""
    parser.add_argument("model", help="a checkpoint file, a model directory, or a name that an installed engine knows")
    add_where(parser)
    parser.add_argument("--feature", dest="features", action="append", default=[], metavar="NAME",
                        help="insist on a feature; can be repeated")
    parser.add_argument("--dtype", help="element type that layers pass on: fp32, bf16, fp16")
    parser.add_argument("--activations", help="element type as which linear layers see them: fp32, bf16, int8")
    parser.add_argument("--kv-cache-dtype", dest="kv_dtype", help="element type of the key-value cache")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of the longest sequence, output included")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that are computed together")
    parser.add_argument("--max-batch-tokens", type=int, metavar="N", help="tokens of one step")
    parser.add_argument("--kv-memory", dest="kv_memory_bytes", type=memory, metavar="SIZE",
                        help="memory of the cache, such as 512M")
    parser.add_argument("--kernel", dest="kernels", type=kernel, action="append", default=[], metavar="OP=NAME",
                        help="insist on a kernel; can be repeated")


def requested(arguments: argparse.Namespace) -> Request:
    """The request of the command line.

    Raises:
        FitmentError: the model cannot be opened.
    """
    options = {name: getattr(arguments, name) for name in OPTIONS}
    return Request.for_checkpoint(open_model(arguments.model), features=tuple(arguments.features),
                                  kernels=dict(arguments.kernels), **options)


def decided(arguments: argparse.Namespace, registry: Registry) -> Plan | Unfit:
    """The plan for the first place of the command line that admits the request, else the first place's refusal."""
    try:
        return admit_first(requested(arguments), places(arguments, registry), registry, engine_of(registry))
    except Unfit as unfit:
        return unfit
