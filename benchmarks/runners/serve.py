"""The protocol of a runner: a JSON request a line in, a JSON answer a line out. A runner is a script of its own, for a Python that has
the engine it measures; it holds one loaded model and measures what it is asked. Imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def serve(load: Callable[[dict[str, Any]], Mapping[str, Callable[..., Any]]]) -> None:
    """Load the model as the first line says, then answer each request with what its measure returns, until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print, and so do their processes
    options = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    measures = {**load(options), "peak_bytes": lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    print(json.dumps({"load_s": time.perf_counter() - started, "measures": sorted(measures)}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(measures[request.pop("measure")](**request)), file=out, flush=True)


def prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    """Token ids that no cache has seen."""
    return [(1009 * seed + 7919 * i) % (vocab - 100) + 50 for i in range(length)]
