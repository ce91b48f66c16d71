def score(session, result, metadata):
    """Reward an answer that names the number of the warehouse."""
    return float(metadata["count"] in (result or {}).get("answer", ""))
