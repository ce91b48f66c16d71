"""Worth 1 when every answer that the agent got is a whole turn on record, and the first engine's death cost none."""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> Json:
    """The reward, and how the turns ended."""
    statuses = [turn["status"] for turn in session["turns"]]
    answered = (result or {}).get("answered", 0)
    engine_came_back = "attempts" not in metadata
    is_right = answered == statuses.count("completed") and (answered == metadata["calls"] or not engine_came_back)
    return {"reward": float(is_right), "statuses": statuses, "refusals": session["refusals"]}
