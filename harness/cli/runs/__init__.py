"""Commands that play rollouts: run, train, exec. They use the suite. Start with `run.py`."""
