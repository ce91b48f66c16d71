"""Sandboxes: a box around one rollout's agent. It shows the workdir, the session and the system, and nothing else.

`sandbox.py` is the seam. Start with `boxed.py`, which has the table of kinds and joins a box with its relay.
"""
