"""Where the agents and scenarios that ship with the harness are.

The wheel carries them in `harness/_bundled/`; in an editable install they stay in the repository, beside the package.
"""

from pathlib import Path
from typing import Literal

from harness.errors import HarnessError

_PACKAGE = Path(__file__).parents[2]


def bundled_directory(name: Literal["agents", "scenarios"], *, package: Path = _PACKAGE) -> Path:
    """The folder of the bundled `name`; `package` is the folder of the `harness` package."""
    candidates = (package / "_bundled" / name, package.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise HarnessError(f"no bundled {name}: looked for {looked}; install the harness again")
