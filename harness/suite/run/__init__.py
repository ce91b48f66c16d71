"""Run a suite: services, rollouts, weight updates, interrupts, report. Start with `runner.py`."""
