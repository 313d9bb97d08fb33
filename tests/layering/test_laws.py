"""The laws of the house: what may import what, and that nobody outside the platforms asks for a platform by name."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEMBERS = {path.parent for pattern in ("*/pyproject.toml", "*/*/pyproject.toml") for path in ROOT.glob(pattern)
           if ".venv" not in path.parts}
PACKAGES = {package.name: package for member in MEMBERS for package in member.iterdir() if (package / "__init__.py").exists()}
PLATFORMS = {member for member in MEMBERS if "fitment.platforms" in
             tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("entry-points", {})}
PLATFORM_PACKAGES = {name for name, path in PACKAGES.items() if path.parent in PLATFORMS}
PLATFORM_NAMES = {"cpu", "cuda", "rocm", "hip", "xpu", "metal", "mps", "mlx", "null"}

MAY_IMPORT = {
    "fitment": set(),
    "fitment_matrix": {"fitment"},
    "fitment_engine": {"fitment", "fitment_matrix"},
    "fitment_triton": {"fitment"},
}


def sources(package: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_the_house_is_found() -> None:
    assert {"fitment", "fitment_matrix", "fitment_engine", "fitment_cpu"} <= set(PACKAGES)
    assert "fitment_cpu" in PLATFORM_PACKAGES


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_imports_only_what_it_may(name: str) -> None:
    allowed = MAY_IMPORT.get(name, {"fitment", "fitment_triton"}) | {name}
    wrong = [f"{path.relative_to(ROOT)} imports {other}" for path, tree in sources(PACKAGES[name]) for other in imported(tree)
             if other.startswith("fitment") and other not in allowed]
    assert not wrong, "\n".join(wrong)


def platform_branches(tree: ast.Module) -> Iterator[int]:
    """Lines that compare something with a platform's name, match on one, or look one up in a literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith"):
            operands = list(node.args)
        else:
            continue
        flat = [item for operand in operands
                for item in (operand.elts if isinstance(operand, (ast.Tuple, ast.List, ast.Set)) else [operand])]
        values = [item.value for item in flat if isinstance(item, ast.Constant)]
        if any(isinstance(value, str) and value.rstrip(":") in PLATFORM_NAMES for value in values):
            yield node.lineno if hasattr(node, "lineno") else 0


def test_no_branch_on_a_platforms_name_outside_the_platforms() -> None:
    outside = [package for name, package in PACKAGES.items() if name not in PLATFORM_PACKAGES]
    found = [f"{path.relative_to(ROOT)}:{line}" for package in outside for path, tree in sources(package)
             if "null" not in path.relative_to(package).parts for line in platform_branches(tree)]
    assert len(found) == 0, "\n".join(found)


def test_the_branch_finder_finds() -> None:
    tree = ast.parse('if p == "cuda": pass\nif p in ("cpu", "x"): pass\nmatch p:\n    case "rocm": pass\nif d.startswith("xpu:"): pass\n')
    assert len(list(platform_branches(tree))) == 4


@pytest.mark.parametrize("member", sorted(PLATFORMS), ids=lambda member: member.name)
def test_every_platform_has_the_same_five(member: Path) -> None:
    [package] = [path for path in PACKAGES.values() if path.parent == member]
    missing = [name for name in ("plugin.py", "detect.py", "hardware.toml", "kernels", "graph.py") if not (package / name).exists()]
    assert not missing
    assert not list(member.rglob("*conformance*.py")), "conformance is one suite, in core"


TORCH_FREE = ("fitment.facts", "fitment.conditions", "fitment.hardware", "fitment.kernels", "fitment.formats", "fitment.features",
              "fitment.plugins", "fitment.hookspecs", "fitment.commands", "fitment.weights", "fitment_matrix.gate",
              "fitment_matrix.options", "fitment_matrix.generate",
              "fitment_matrix.render", "fitment_matrix.cli", "fitment_engine", "fitment_engine.plugin", "fitment_cpu.plugin",
              "fitment_cpu.detect")


def test_what_describes_imports_no_torch() -> None:
    code = f"import importlib, sys\nfor name in {TORCH_FREE!r}: importlib.import_module(name)\n"
    code += "import fitment.formats\nfitment.formats.formats()\n"
    code += "assert not ({'torch', 'triton'} & set(sys.modules)), 'torch was imported'\n"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_project_speaks_of_itself_alone() -> None:
    """No path of a development machine in what is committed."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    words = ("/" + "work/", ".lib" + "rary/", "../" + "shared")
    wrong = [name for name in listed if name and (ROOT / name).is_file() and any(
        word in (ROOT / name).read_text(encoding="utf-8", errors="ignore") for word in words)]
    assert not wrong
