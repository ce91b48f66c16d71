"""Worth 1 when the agent got every answer it asked for, and the session holds one whole turn for each and no other."""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> Json:
    """The reward, and how the turns ended."""
    statuses = [turn["status"] for turn in session["turns"]]
    answered = (result or {}).get("answered")
    return {
        "reward": float(answered == metadata["calls"] and statuses == ["completed"] * metadata["calls"]),
        "statuses": statuses,
        "refusals": session["refusals"],
    }
