"""Where an episode runs."""


def stat_scope():
    """The name of the trackers."""
    return "rollout"
