"""Sandboxes: a box around one rollout's agent. It shows the workdir, the session and the system, and nothing else.

`sandbox.py` is the seam, `kinds.py` the table of kinds. Start with `boxed.py`, which joins a box with its relay.
"""
