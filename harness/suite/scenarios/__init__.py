"""Scenarios: file format, folders, and plan of rollouts. Start with `scenario.py`."""
