"""Run and judge scenarios: `harness run`, `harness train`. Start with `run/runner.py`.

Rooms, lowest first: scenarios, record, judge, faults, run, training.
"""
