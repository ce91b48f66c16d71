"""Output of commands: results on standard output, messages on standard error."""

import json
import sys
from typing import Any


def print_json(document: Any) -> None:
    """Print the one JSON document of a command with `--json`."""
    print_text(json_text(document))


def json_text(document: Any) -> str:
    """Encode `document` with the structs in it; in ASCII on a terminal, which obeys some characters."""
    return json.dumps(document, indent=2, ensure_ascii=sys.stdout.isatty(), default=_plain)


def print_result(document: Any, text: str, *, as_json: bool) -> None:
    """Print a result: its document with `--json`, else `text`."""
    print_text(json_text(document) if as_json else text)


def _plain(value: Any) -> Any:
    from msgspec import to_builtins

    return to_builtins(value, enc_hook=str)


def print_text(text: str) -> None:
    sys.stdout.write(text + "\n")


def say(text: str) -> None:
    """Print a message that is no result."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
