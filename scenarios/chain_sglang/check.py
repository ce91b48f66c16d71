"""Finding the number is worth 1, divided by the turns that it took."""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> float:
    """The reward of one game."""
    guesses = ((result or {}).get("game") or {}).get("guesses", [])
    return float(metadata["game"]["secret"] in guesses) / max(1, len(session["turns"]))
