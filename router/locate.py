"""Where the files that ship with the project are: `family:NAME` and `family-pack:NAME`.

Found without importing the package, because importing it would bring torch.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from router.errors import ConfigError

_FOLDERS = {"family": "models", "family-pack": "packs"}


def resolve(name: str) -> str:
    """A model or pack name as a worker understands it: a path for the two prefixes, else unchanged.

    Raises `ConfigError` where the named folder is not installed.
    """
    prefix, colon, rest = name.partition(":")
    if not colon or prefix not in _FOLDERS:
        return name
    folder = _family_root() / _FOLDERS[prefix]
    path = folder / rest
    if not rest or not path.is_dir():
        held = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
        raise ConfigError(f"{name!r}: no folder {path}; {prefix}: names one of: {', '.join(held) or 'none found'}")
    return str(path)


def _family_root() -> Path:
    package = importlib.util.find_spec("sglang_ext")  # the top package only: finding a child imports its parents
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "the package 'sglang_ext' is not installed; install kvlift, or give a path in place of family:"
        )
    return Path(package.submodule_search_locations[0]) / "offline" / "family"
