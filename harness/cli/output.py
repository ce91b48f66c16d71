"""Results go to standard output, everything said on the way to standard error."""

import json
import sys
from typing import Any


def print_json(document: Any) -> None:
    """Print the one JSON document of a command with `--json`."""
    print_text(json_text(document))


def json_text(document: Any) -> str:
    """`document` as standard output takes it: a terminal obeys some characters, so it is ASCII there."""
    return json.dumps(document, indent=2, ensure_ascii=sys.stdout.isatty())


def print_text(text: str) -> None:
    """Print a result for a reader."""
    sys.stdout.write(text + "\n")


def say(text: str) -> None:
    """Say something that is no result."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def print_error(message: str) -> None:
    """Say why a command failed."""
    say(f"harness: {message}")
