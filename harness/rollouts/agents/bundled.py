"""Folders of the bundled agents and scenarios."""

from pathlib import Path
from typing import Literal

from harness.errors import HarnessError

_PACKAGE = Path(__file__).parents[2]


def bundled_directory(name: Literal["agents", "scenarios"], *, package: Path = _PACKAGE) -> Path:
    # In the wheel they are in `harness/_bundled/`, in an editable install beside the package.
    candidates = (package / "_bundled" / name, package.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise HarnessError(f"no bundled {name}: looked for {looked}; reinstall the harness")
