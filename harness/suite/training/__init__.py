"""Train on a scenario (`harness train`): connects run services, collector and learner.

Top room of the suite. Start with `train_run.py`.
"""
