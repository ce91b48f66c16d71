"""Sentences that were finished within the limit, as a share of all answers."""


def score(session, result, metadata):
    """The reward of one story."""
    statuses = [turn["status"] for turn in session["turns"]]
    if not statuses:
        return 0.0
    return {"reward": statuses.count("completed") / len(statuses), "truncated": statuses.count("truncated")}
