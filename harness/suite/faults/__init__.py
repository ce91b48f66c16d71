"""Faults of scenarios: when they are due, and how they break things. Start with `injector.py`."""
