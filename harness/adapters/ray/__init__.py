"""Rollouts on the nodes of a Ray cluster (docs/scaling.md). `rollouts.py` controls; `node.py` runs on every node."""
