"""Learners: packs in, one weight update per step out. Start with `learner.py`."""
