"""Rollouts on the nodes of a Ray cluster; see docs/scaling.md. Start with `rollouts.py`, the controller; `node.py` runs
on every node. Programs import from `harness`.
"""
