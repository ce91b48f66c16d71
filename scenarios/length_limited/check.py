"""Sentences that were finished within the limit, as a share of all answers."""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> Json:  # noqa: ARG001
    """The reward of one story."""
    statuses = [turn["status"] for turn in session["turns"]]
    if not statuses:
        return {"reward": 0.0, "truncated": 0}
    return {"reward": statuses.count("completed") / len(statuses), "truncated": statuses.count("truncated")}
