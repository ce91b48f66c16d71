"""Append-only chat templates, for families whose own templates rewrite what they rendered, or lose tools.

A session never has to branch. A template that differs from its maker's says where, at its top.
"""

from importlib.resources import files
from pathlib import Path

from harness.errors import TokenizerError

TEMPLATES = ("chatml_hermes", "deepseek_v3", "gpt_oss", "mistral_nemo", "phi4")


def find_template(name: str, directory: Path = Path()) -> Path:
    """Return the file of the template `name`, or the file at that path. Raises `TokenizerError` without either."""
    if name in TEMPLATES:
        return Path(str(files("harness.lab.models") / f"{name}.jinja"))
    path = directory / Path(name).expanduser()
    if not path.is_file():
        raise TokenizerError(f"no chat template {name!r}; expected a file, or one of {', '.join(TEMPLATES)}")
    return path
