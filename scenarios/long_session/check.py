"""The reward is the share of sums that were right; an early end counts every sum that was not asked as wrong."""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> Json:  # noqa: ARG001
    """The reward of one drill."""
    game = (result or {}).get("game") or {"asked": 0, "right": 0}
    return {"reward": game["right"] / metadata["game"]["sums"], "right": game["right"], "asked": game["asked"]}
