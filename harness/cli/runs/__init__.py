"""Commands that play rollouts: run, train, exec, fork, replay. They use the suite. Start with `run.py`."""
