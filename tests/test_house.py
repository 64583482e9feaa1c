"""The house: four floors, a lower one never imports a higher one, and the router never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("policies", "sglang_ext", "router", "loadtest")


def imported_packages(file: Path) -> set[str]:
    """The top packages that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_none_above_it(floor: str):
    above = set(FLOORS[FLOORS.index(floor) + 1 :]) | {"tests"}
    for file in (ROOT / floor).rglob("*.py"):
        assert not imported_packages(file) & above, f"{file.relative_to(ROOT)} imports a higher floor"


def test_policies_are_pure():
    allowed = {"policies", "pydantic", "__future__"} | set(sys.stdlib_module_names)
    for file in (ROOT / "policies").rglob("*.py"):
        assert imported_packages(file) <= allowed, file


@pytest.mark.parametrize("module", ["router.app", "router.up", "router.demo", "router.cli", "policies", "sglang_ext.cli"])
def test_the_base_install_never_imports_torch(module: str):
    heavy = ("torch", "sglang", "transformers")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_both_plugin_groups_use_one_name():
    """SGLang's SGLANG_PLUGINS filters both groups by name."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert list(points["sglang.srt.plugins"]) == list(points["sglang.srt.platforms"]) == ["kvlift"]


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    assert all("==" in one or one.startswith("kvlift[") for one in listed)
    assert not any(one.startswith(("torch", "sglang")) for one in project["dependencies"])
