"""A way to one session for a sandbox without a network: `outside.py`, and `inside.py` in it. See `link` first."""
