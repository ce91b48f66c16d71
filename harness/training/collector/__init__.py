"""Collector: turns rollouts into optimizer steps of exact size, packed for a learner.

May use `control`, `rollouts`, `learner`, `store` and what these use. Start with `collector.py`.
"""
