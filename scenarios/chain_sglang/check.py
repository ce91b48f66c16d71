"""Finding the number is worth 1."""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> float:
    """The reward of one game."""
    return float(((result or {}).get("game") or {}).get("found", False))
