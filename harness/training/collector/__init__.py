"""Collector: turns rollouts into optimizer steps of exact size, packed for a learner. Start with `collector.py`."""
