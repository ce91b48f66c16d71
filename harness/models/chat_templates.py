"""Chat templates of this project, for families whose own rewrites what it rendered, or loses tools; chosen by name.

Append-only: a message renders the same whatever comes after its turn, so a session never has to branch. The model sees
another prompt than its maker's template would give it where the two differ; each says where, at its top.
"""

from importlib.resources import files
from pathlib import Path

from harness.errors import TokenizerError

TEMPLATES = ("chatml_hermes", "deepseek_v3", "gpt_oss", "mistral_nemo", "phi4")
"""Their names."""


def find_template(name: str, directory: Path = Path()) -> Path:
    """The file of the template called `name`, else the file at that path, from `directory` on.

    Raises `TokenizerError` without either.
    """
    if name in TEMPLATES:
        return Path(str(files("harness.models") / f"{name}.jinja"))
    path = directory / Path(name).expanduser()
    if not path.is_file():
        raise TokenizerError(f"no chat template {name!r}; expected a file, or one of {', '.join(TEMPLATES)}")
    return path
