"""Run and judge scenarios. Start with `run/runner.py`."""
