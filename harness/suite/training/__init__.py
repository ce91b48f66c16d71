"""Train on a scenario (`harness train`), the top room of the suite. Start with `train_run.py`."""
